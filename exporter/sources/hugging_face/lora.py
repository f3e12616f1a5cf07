"""An adapter of peft's, LoRA, merged into the weights of the model it was trained on.

    W' = W + s B A                    of a linear layer, W (out, in), A (r, in), B (out, r)
    W' = W + s (B A)^T                of an embedding, W (tokens, width), A (r, tokens)
    s  = lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora

Modules of ``modules_to_save`` are replaced as they are. Source: Hu et al., LoRA, 2021;
Kalajdzievski, A Rank Stabilization Scaling Factor, 2023; names of files and tensors are peft's.

A class with towers has the language model below ``language_model``, with the same names otherwise:
an adapter of either class fits the other.

Every setting and every tensor is either taken into account or refused by name: what an adapter of
another kind computes is not a sum of this form.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linexport.errors import UnsupportedModelError, UsageError
from linexport.sources.files import refuse
from linexport.sources.hugging_face.folder import (
    ADAPTER,
    CONFIG,
    copied_files,
    missing,
    read_json,
)
from linexport.sources.hugging_face.hub import ADAPTER_WEIGHTS, cached_folder
from linexport.sources.packed import FLOATS

if TYPE_CHECKING:
    from torch import Tensor, nn

WEIGHTS, PICKLE = ADAPTER_WEIGHTS, "adapter_model.bin"
LIBRARY = "transformers.models."
PREFIX, WRAPPED = "base_model.model.", ".base_layer."
FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<side>[AB])(\.weight)?")

OUTER = re.compile(r"((model|language_model|text_model)(\.|$))+")
"""Names around a language model: other ones in a class with towers, and none in a base model."""

HEADS = {
    None: None,
    "CAUSAL_LM": "causal_lm",
    "SEQ_CLS": "sequence_classification",
    "TOKEN_CLS": "token_classification",
    "FEATURE_EXTRACTION": "hidden_states",
}
"""Heads of the models that adapters of a task_type were trained on; None fits any."""

TAKEN = {
    *("peft_type", "task_type", "base_model_name_or_path", "init_lora_weights"),
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "auto_mapping"),
}
"""Settings that are read here."""

SAID = {
    *("revision", "peft_version", "inference_mode", "lora_dropout"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("modules_to_save", "fan_in_fan_out", "megatron_core", "qalora_group_size", "loftq_config"),
}
"""Settings that change nothing, or nothing that the tensors do not say by their names.

A linear layer's weight is (out, in), whatever fan_in_fan_out says: so peft takes it, too.
"""

NEUTRAL: tuple[Any, ...] = (None, False, {}, [], "none")
"""Values by which any other setting asks for nothing."""

DRAWN = (True, False, None, "gaussian")
"""Values of init_lora_weights that leave the model's own weights alone."""


@dataclass(frozen=True)
class Adapter:
    """An adapter that was read and found to be of a kind that can be merged.

    Attributes:
        folder: of its files.
        task: its task_type.
        alpha: lora_alpha.
        rank: r; None where layers have ranks of their own.
        stable: the scale is that of rank-stabilised LoRA.
    """

    folder: Path
    task: str | None
    alpha: float
    rank: int | None
    stable: bool

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that say what the adapter is."""
        return self.folder / ADAPTER, self.folder / WEIGHTS

    @property
    def copied(self) -> tuple[Path, ...]:
        """Files of a tokenizer and the like, which go before those of the model."""
        return copied_files(self.folder)

    def check_head(self, head: str, base: Path) -> None:
        """Refuse a model whose head is not that of the adapter's task.

        Raises:
            UnsupportedModelError: see above.
        """
        expected = HEADS[self.task]
        if expected not in (None, "hidden_states" if head == "pooled" else head):
            raise refuse(
                self.folder / ADAPTER,
                f"an adapter with task_type {self.task} for {base / CONFIG}, which names a model "
                f"of the kind {head}",
                "save the model in the class that it was trained in with transformers' "
                "save_pretrained, and let base_model_name_or_path name that folder",
            )

    def merge(self, model: nn.Module) -> None:
        """Change the weights of a model.

        Raises:
            UnsupportedModelError: a tensor that belongs to no weight of the model, or not to one
                alone.
        """
        import torch

        tensors = self._tensors()
        factors: dict[str, dict[str, Tensor]] = {}
        with torch.no_grad():
            for name, tensor in tensors.items():
                found = FACTOR.fullmatch(name)
                if found is None:
                    self._weight(model, name, tensor.shape).copy_(tensor)
                else:
                    key = f"{found['kind'] or ''}{found['side']}"
                    factors.setdefault(found["module"], {})[key] = tensor
            for module, pair in factors.items():
                self._add(model, module, pair)

    def _tensors(self) -> dict[str, Tensor]:
        try:
            from safetensors import SafetensorError
            from safetensors.torch import load_file
        except ImportError as error:
            raise missing(error) from None
        path = self.folder / WEIGHTS
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise refuse(path, f"a damaged safetensors file ({error})", "copy it again") from error
        kinds = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
        floats = {f"torch.{kinds[name]}" for name in FLOATS}
        for name, tensor in tensors.items():
            if not name.startswith(PREFIX) or str(tensor.dtype) not in floats:
                raise self._foreign(name, f"of dtype {tensor.dtype}")
        # A weight that is saved beside its factors has the name of the layer that peft wraps.
        own = {name: name.removeprefix(PREFIX).replace(WRAPPED, ".") for name in tensors}
        if len(set(own.values())) < max(1, len(own)):
            raise refuse(path, "no tensors, or two for one weight", "copy it again")
        return {own[name]: tensor.float() for name, tensor in tensors.items()}

    def _add(self, model: nn.Module, name: str, pair: dict[str, Tensor]) -> None:
        import torch

        modules = dict(model.named_modules())
        name = self._own(modules, name)
        module = modules.get(name)
        kinds = {"AB": torch.nn.Linear, "embedding_Aembedding_B": torch.nn.Embedding}
        kind = kinds.get("".join(sorted(pair)))
        if kind is None or type(module) is not kind:
            place = (
                f"no module of {type(model).__name__}"
                if module is None
                else f"a {type(module).__name__}"
            )
            raise self._foreign(f"{name}.lora_{min(pair)}", f"for {place}")
        a, b = (pair[side] for side in sorted(pair))
        rank = a.shape[0]
        if a.ndim != 2 or b.ndim != 2 or b.shape[1] != rank or self.rank not in (None, rank):
            shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
            raise self._foreign(f"{name}.lora_{min(pair)}", f"of shapes {shapes}, r {self.rank}")
        scale = self.alpha / (math.sqrt(rank) if self.stable else rank)
        change = b @ a if kind is torch.nn.Linear else (b @ a).T
        self._weight(model, f"{name}.weight", change.shape).add_(change, alpha=scale)

    def _weight(self, model: nn.Module, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a parameter of the model, which no other part of it shares."""
        named = dict(model.named_parameters(remove_duplicate=False))
        name = self._own(named, name)
        weight = named.get(name)
        if weight is None or weight.shape != shape:
            found = "which the model has not" if weight is None else f"the model's {weight.shape}"
            raise self._foreign(name, f"of shape {tuple(shape)}, {found}")
        shared = [other for other, value in named.items() if value is weight and other != name]
        if shared:
            raise refuse(
                self.folder / WEIGHTS,
                f"{name}, which the model shares with {shared[0]}: changing one changes both",
                "merge it with peft's merge_and_unload, and give the folder of the result",
            )
        return weight

    def _own(self, names: Iterable[str], name: str) -> str:
        """Return the name that a module or weight has in the model, by its name in another class.

        Raises:
            UnsupportedModelError: it may be one of several.
        """
        found = [n for n in names if _inner(n) == _inner(name)]
        if name in found or len(found) < 2:
            return name if name in found or not found else found[0]
        raise self._foreign(name, f"for one of {', '.join(sorted(found)[:2])}")

    def _foreign(self, name: str, what: str) -> UnsupportedModelError:
        return refuse(
            self.folder / WEIGHTS,
            f"a tensor {name} {what}; expected {PREFIX}MODULE.lora_A.weight and lora_B.weight of "
            "linear layers of the model, lora_embedding_A and _B of its embeddings, or weights "
            "that it has",
            "take the adapter of this model, or merge it with peft's merge_and_unload",
        )


def _inner(name: str) -> str:
    """Return the name of a module or weight inside the language model."""
    outer = OUTER.match(name)
    return name[outer.end() :] if outer else name


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter's configuration.

    Raises:
        UsageError: a file cannot be read.
        UnsupportedModelError: an adapter of another kind, or a setting that is not known here.
    """
    path = folder / ADAPTER
    config = read_json(path)
    for name, value in _unknown(config):
        raise refuse(
            path,
            f"{name} is {str(value)[:80]!r}, which is not merged here; LoRA without it is",
            "merge the adapter with peft's merge_and_unload, and give the folder of the result",
        )
    trained = config.get("auto_mapping")
    if isinstance(trained, dict) and not str(trained.get("parent_library")).startswith(LIBRARY):
        raise refuse(
            path,
            f"an adapter of the class {str(trained.get('base_model_class'))[:80]} in "
            f"{str(trained.get('parent_library'))[:80]}, which is not one of transformers",
            "merge it with peft's merge_and_unload, and convert the result in a factory, "
            "package.module:callable",
        )
    if not (folder / WEIGHTS).is_file() and (folder / PICKLE).is_file():
        raise refuse(
            folder,
            f"weights as a pickle ({PICKLE}), which can run any code when opened",
            "save them as safetensors with peft's save_pretrained, where you trust them",
        )
    if not (folder / WEIGHTS).is_file():
        raise refuse(
            folder,
            f"no {WEIGHTS} beside {ADAPTER}",
            "save the adapter as safetensors, which peft does by default",
        )
    rank, alpha = config.get("r", 8), config.get("lora_alpha", 8)
    stable = config.get("use_rslora") or False
    known = type(rank) is int and rank > 0 and type(alpha) in (int, float)
    if not known or not math.isfinite(alpha) or type(stable) is not bool:
        said = f"r {rank!r}, lora_alpha {alpha!r} and use_rslora {stable!r}"
        raise refuse(path, f"{said}; expected two numbers and true or false", "copy it again")
    own = bool(config.get("rank_pattern"))
    task = config.get("task_type")
    return Adapter(folder, task, float(alpha), None if own else rank, stable)


def _unknown(config: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield settings of which it is not known that the sum above has them."""
    if config.get("peft_type") != "LORA":
        yield "peft_type", config.get("peft_type")
    task = config.get("task_type")
    if not (task is None or isinstance(task, str)) or task not in HEADS:
        yield "task_type", task
    if config.get("init_lora_weights") not in DRAWN:
        yield "init_lora_weights", config["init_lora_weights"]
    for name, value in config.items():
        if name not in TAKEN | SAID and value not in NEUTRAL:
            yield name, value


def model_folder(source: str | Path) -> Path:
    """Return the folder of the model of an adapter, and any other source as it is."""
    path = Path(source)
    if not (path / ADAPTER).is_file() or (path / CONFIG).exists():
        return path
    try:
        return base_folder(path)
    except UsageError:  # said where it is read
        return path


def base_folder(folder: Path) -> Path:
    """Return the folder of the model that an adapter changes.

    That is ``base_model_name_or_path`` as a folder, also beside the adapter's own, or as the name
    of a model in the Hugging Face cache.

    Raises:
        UsageError: there is no such folder, or nothing names it.
    """
    name = read_json(folder / ADAPTER).get("base_model_name_or_path")
    if not isinstance(name, str) or not name or "\0" in name:
        raise UsageError(
            f"{folder / ADAPTER} names no model: base_model_name_or_path is {name!r}. Write the "
            "folder of the model that the adapter was trained on there."
        )
    for place in (Path(name), folder.parent / name, folder.resolve().parent / Path(name).name):
        if (place / CONFIG).is_file():
            return place
    try:
        return cached_folder(name)
    except UsageError as error:
        raise UsageError(
            f"{folder / ADAPTER}: base_model_name_or_path is {name!r}, where no model is, nor "
            f"beside the adapter. {error}"
        ) from None
