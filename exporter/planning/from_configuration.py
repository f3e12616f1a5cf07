"""The weights and states of a model folder of transformers, from its configuration alone.

The model is built without values and run on shapes, once on 64 tokens and once on 65: what its
cache has more the second time grows with the tokens. No weight is read, and none has to be there.
Scratch memory is an estimate: it depends on the graph that conversion makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from linexport.errors import EnvironmentProblemError, LinexportError
from linexport.models import flash_linear_attention
from linexport.planning.planned_model import PlannedModel
from linexport.planning.weights import PlannedWeight, Role
from linexport.sources.diffusers import folder as diffusers
from linexport.sources.files import first_line, refuse
from linexport.sources.hugging_face.folder import CONFIG, read_config, read_json
from linexport.sources.hugging_face.pretrained import quiet, without_weights
from linexport.system.untyped import LibraryObject

if TYPE_CHECKING:
    import torch

TOKENS = 64

VALUES_OF_A_TOKEN = 6
"""Values inside a layer that are held at once, each as wide as its widest product."""

FLOAT32 = 4


def planned(folder: Path) -> PlannedModel:
    """Read a model folder.

    Raises:
        UsageError: its configuration cannot be read.
        UnsupportedModelError: transformers does not build the model, or it cannot be run on shapes.
        EnvironmentProblemError: PyTorch or transformers is not installed.
    """
    if diffusers.NAME in read_json(folder / CONFIG):
        raise refuse(
            folder / CONFIG,
            "a configuration of diffusers, of which only converted models are planned",
            "convert it, and plan with the artifact",
        )
    config = read_config(folder, False)
    if config["model_type"] in flash_linear_attention.layouts():
        raise refuse(
            folder / CONFIG,
            "a checkpoint of flash-linear-attention, of which transformers builds no shapes",
            "convert it, and plan with the artifact",
        )
    model = without_weights(folder, config)
    weights = tuple(_weights(model))
    fixed, grown = _cache(folder, model)
    text = model.config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 0
    products = [w.outputs // w.experts for w in weights if w.role in ("product", "tied", "experts")]
    widest = max((n for n in products if n != text.vocab_size), default=0)

    def scratch(rows: int, tokens: int, past: int) -> int:
        scores = heads * (past + tokens) if grown else 0
        values = text.vocab_size + tokens * (VALUES_OF_A_TOKEN * widest + scores)
        return rows * (FLOAT32 * values + fixed + grown * (past + tokens))

    count = sum(prod((w.outputs, w.inputs)) for w in weights)
    return PlannedModel(
        f"{config['model_type']}: {type(model).__name__}, {count / 1e6:,.1f} M parameters, before "
        "conversion",
        weights,
        fixed,
        grown,
        scratch,
        streams=bool(fixed or grown),
    )


def _weights(model: LibraryObject) -> Iterator[PlannedWeight]:
    import torch

    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    head = model.get_output_embeddings()
    tied = id(head.weight) if head is not None else None
    chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 1
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if len(shape) == 3 and "expert" in name:
            yield PlannedWeight(name, "experts", prod(shape[:2]), shape[2], shape[0], chosen)
        elif len(shape) == 2:
            role: Role = "table" if id(parameter) in tables else "product"
            yield PlannedWeight(
                name, "tied" if role == "table" and id(parameter) == tied else role, *shape
            )
        elif len(shape) < 2:
            yield PlannedWeight(name, "other", prod(shape), 1)
        else:
            yield PlannedWeight(name, "other", prod(shape[:-1]), shape[-1])


def _cache(folder: Path, model: LibraryObject) -> tuple[int, int]:
    """Return the bytes of states of a fixed size, and what a token adds, of one sequence.

    Raises:
        UnsupportedModelError: the model does not run on shapes.
    """
    import torch

    sizes = []
    try:
        for tokens in (TOKENS, TOKENS + 1):
            with quiet(), torch.device("meta"), torch.no_grad():
                ids = torch.zeros(1, tokens, dtype=torch.long)
                outputs = model(input_ids=ids, use_cache=True)
                names = [n for n in ("past_key_values", "cache_params") if n in outputs]
                cache = outputs[names[0]] if names else None
            sizes.append([x.numel() for x in _tensors(cache, set())])
    except (LinexportError, EnvironmentProblemError):
        raise
    except Exception as error:  # the library's own code
        raise refuse(
            folder / CONFIG,
            f"a model that does not run on shapes alone ({first_line(error)})",
            "convert it, and plan with the artifact",
        ) from error
    before, after = sizes
    fixed = sum(a for a, b in zip(before, after, strict=True) if a == b)
    return FLOAT32 * fixed, FLOAT32 * (sum(after) - sum(before))


def _tensors(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yield the tensors of a cache, whatever its class."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, Mapping):
            inner = list(value.values())
        elif isinstance(value, list | tuple):
            inner = list(value)
        else:
            inner = list(getattr(value, "__dict__", {}).values())
        for one in inner:
            if not isinstance(one, type | torch.nn.Module | str):
                yield from _tensors(one, seen)
