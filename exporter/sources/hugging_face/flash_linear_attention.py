"""A checkpoint of flash-linear-attention, built from ``linexport.models.flash_linear_attention``.

The library itself is not needed. States are those of the linexport ops the model is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from linexport.errors import LinexportError
from linexport.sources.files import first_line, refuse
from linexport.sources.hugging_face.folder import (
    CONFIG,
    check_weights,
    copied_files,
    digest,
    missing,
)
from linexport.sources.hugging_face.size_limits import limit_size
from linexport.sources.loaded_model import LanguageFacts, LoadedModel, Source
from linexport.sources.memory_map import mapped_parameters
from linexport.sources.sizes import float32_bytes
from linexport.sources.weights import check_finite, named_tensors, parameter_summary

if TYPE_CHECKING:
    import torch

    from linexport.models.flash_linear_attention import CausalLM

BATCH, SEQUENCE = "batch", "seq"
EXAMPLE = (2, 5)

EMBEDDINGS, LOGITS = "embeddings.weight", "lm_head.weight"
"""One weight under two names, where they are tied; files may hold the first alone."""


def load(
    folder: Path, config: Mapping[str, object], files: list[Path], location: str
) -> LoadedModel:
    """The language model of a folder whose model type is one of ``layouts()``.

    Raises:
        EnvironmentProblemError: safetensors is not installed.
        UsageError: a setting of the configuration is of the wrong type.
        UnsupportedModelError: a setting that is not implemented, or weights that do not fit.
    """
    import torch
    from torch.export import Dim

    from linexport.models.flash_linear_attention import build

    copied = copied_files(folder)
    try:
        with torch.device("meta"), limit_size(folder, files):
            build(config)
        with mapped_parameters(float32_bytes(folder) or 1):
            model = build(config)
    except LinexportError:
        raise
    except Exception as error:  # widths are computed from settings, any of which may be wrong
        raise refuse(
            folder / CONFIG,
            f"a configuration from which no model can be built ({first_line(error)})",
            "compare it with that of a published model of the same type",
        ) from error
    _load_weights(model, folder, files)
    check_finite(named_tensors(model), str(folder))
    settings = model.settings
    ids = torch.zeros(EXAMPLE, dtype=torch.int64)
    tokens = {0: Dim(BATCH), 1: Dim(SEQUENCE)}
    return LoadedModel(
        module=model.eval(),
        args=(ids, torch.ones_like(ids)),
        kwargs={},
        dynamic_shapes=(tokens, tokens),
        source=Source(
            kind="hugging_face",
            location=location,
            sha256=digest([folder / CONFIG, *files]),
            description=f"{config['model_type']}: {parameter_summary('CausalLM', model)}",
        ),
        integer_ranges={0: (0, settings.vocab_size), 1: (1, 2)},
        language=LanguageFacts(
            vocabulary=settings.vocab_size,
            context=None,
            layers=tuple(f"{model.stack}.layers.{i}" for i in range(settings.num_hidden_layers)),
        ),
        outputs=("logits",),
        defaults={"attention_mask": 1},
        files=copied,
    )


def _load_weights(model: CausalLM, folder: Path, files: list[Path]) -> None:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise missing(error) from None
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        weights |= load_file(file)
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    embeddings = f"{model.stack}.{EMBEDDINGS}"
    if model.settings.tie_word_embeddings and embeddings in weights:
        weights.setdefault(LOGITS, weights[embeddings])
    check_weights(
        folder,
        absent=expected.keys() - weights.keys(),
        misshapen=[
            (name, tuple(weights[name].shape), tuple(shape))
            for name, shape in expected.items()
            if name in weights and weights[name].shape != shape
        ],
        unknown=weights.keys() - expected.keys(),
    )
    model.load_state_dict(weights)
