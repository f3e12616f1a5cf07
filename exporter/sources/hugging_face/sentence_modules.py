"""Modules of sentence-transformers behind a model, read as data from its folder.

    modules.json               the modules in order, each with a type and a folder
    Pooling                    hidden states (B, T, W) and mask m (B, T) to one vector (B, W):
        cls, lasttoken         h_t of the first, the last t with m_t = 1
        mean                   sum_t m_t h_t / sum_t m_t
        mean_sqrt_len_tokens   sum_t m_t h_t / sqrt(sum_t m_t)
        weightedmean           sum_t w_t h_t / sum_t w_t,     w_t = m_t sum_{s <= t} m_s
        max                    max_t h_t over m_t = 1
        include_prompt: false  m_t = 0 for tokens of a prompt, but those count in the w_t of others
    Dense                      f(x A^T + b), and with a residual + x, or + x R^T
    LayerNorm, Normalize       x / max(|x|, 1e-12) is the latter

Several poolings of one module are side by side. Without a pooling each token keeps its vector, as
late interaction takes them. Source: the modules of sentence-transformers 6 and of PyLate 1.6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linexport.sources.files import check_link, refuse
from linexport.sources.hugging_face.folder import (
    MODULES,
    check_weights,
    read_json,
    read_json_value,
)
from linexport.sources.state_dicts import read_weights
from linexport.system.json_object import JsonObject

SENTENCE, TOKENS = "sentence_embedding", "token_embeddings"
"""Names of what modules give, of a whole text and of each token."""

ACTIVATIONS = {
    f"torch.nn.modules.{room}.{kind.__name__}": kind
    for room, kinds in {
        "activation": (nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid),
        "linear": (nn.Identity,),
    }.items()
    for kind in kinds
}
"""Classes that a Dense may name as its activation."""

WEIGHTS = ("model.safetensors", "pytorch_model.bin")

POOL = "with --pooling mean, last or cls"
"""Part of the advice where modules are not converted."""

MOST = 32
"""Modules of one model, and poolings of one module."""


def first(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the first token's state of each row, (B, W)."""
    return _at(hidden, mask.argmax(-1))


def last(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the last token's state of each row, (B, W)."""
    place = torch.arange(mask.shape[1])
    return _at(hidden, (place * mask).argmax(-1))


def mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the tokens' states of each row, (B, W)."""
    return _sum(hidden, mask) / mask.sum(1, keepdim=True).clamp(min=1).to(hidden.dtype)


def _scaled_sum(hidden: Tensor, mask: Tensor) -> Tensor:
    count = mask.sum(1, keepdim=True).clamp(min=1).to(hidden.dtype)
    return _sum(hidden, mask) / count.sqrt()


def _weighted(hidden: Tensor, mask: Tensor, counted: Tensor) -> Tensor:
    weights = (counted.cumsum(1) * mask).to(hidden.dtype)
    kept = torch.where(mask.bool()[..., None], hidden, 0.0)
    return (kept * weights[..., None]).sum(1) / weights.sum(1, keepdim=True).clamp(min=1)


def _largest(hidden: Tensor, mask: Tensor) -> Tensor:
    least = torch.finfo(hidden.dtype).min
    return torch.where(mask.bool()[..., None], hidden, least).amax(1)


def _sum(hidden: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.bool()[..., None], hidden, 0.0).sum(1)


def _at(hidden: Tensor, place: Tensor) -> Tensor:
    return hidden[torch.arange(hidden.shape[0]), place]


WEIGHTED = "weightedmean"

MODES = {
    "cls": first,
    "max": _largest,
    "mean": mean,
    "mean_sqrt_len_tokens": _scaled_sum,
    WEIGHTED: lambda hidden, mask: _weighted(hidden, mask, mask),
    "lasttoken": last,
}
"""Poolings by their names in sentence-transformers."""

OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Poolings by the settings of earlier releases."""


class Dense(nn.Module):
    """f(x A^T + b), with a residual where a model has one.

    Args:
        sizes: of inputs and outputs.
        bias: b is added.
        activation: f.
        residual: x, or x R^T where sizes differ, is added.
    """

    def __init__(
        self, sizes: tuple[int, int], bias: bool, activation: nn.Module, residual: bool
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(*sizes, bias=bias)
        self.activation, self.has_residual = activation, residual
        if residual and sizes[0] != sizes[1]:
            self.residual = nn.Linear(*sizes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Project vectors, (..., inputs) to (..., outputs)."""
        found: Tensor = self.activation(self.linear(x))
        if not self.has_residual:
            return found
        return found + (self.residual(x) if hasattr(self, "residual") else x)


class NamedLayerNorm(nn.Module):
    """A norm over the last axis, with weights by the names of the file."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Norm vectors, (..., width)."""
        found: Tensor = self.norm(x)
        return found


class Normalize(nn.Module):
    """Vectors of length one."""

    def forward(self, x: Tensor) -> Tensor:
        """Divide vectors by their length, (..., width)."""
        return F.normalize(x, p=2, dim=-1)


class SentenceModules(nn.Module):
    """The modules behind a model.

    Args:
        modes: poolings, side by side; none for a vector of each token.
        rest: what follows.
        files: that they were read from.
        takes_prompt: tokens of a prompt are pooled like others.
    """

    def __init__(
        self,
        modes: Sequence[str],
        rest: Sequence[nn.Module],
        files: Sequence[Path] = (),
        takes_prompt: bool = True,
    ) -> None:
        super().__init__()
        self.modes, self.rest, self.files = tuple(modes), nn.Sequential(*rest), tuple(files)
        self.takes_prompt = takes_prompt

    @property
    def output(self) -> str:
        """Name of the result."""
        return SENTENCE if self.modes else TOKENS

    def forward(self, hidden: Tensor, mask: Tensor, pooling_mask: Tensor | None = None) -> Tensor:
        """Return the vector of each text, or of each token.

        Args:
            hidden: (B, T, width), floating.
            mask: (B, T), integers, 1 for tokens and 0 for padding.
            pooling_mask: (B, T), integers, 0 for tokens that are not pooled, such as those of a
                prompt; None for none. Of a row without any others, all tokens are.

        Returns:
            (B, size), or (B, T, size) without a pooling, of the dtype of ``hidden``.
        """
        kept = mask if pooling_mask is None else mask * pooling_mask
        if pooling_mask is not None:
            kept = torch.where(kept.sum(1, keepdim=True) > 0, kept, mask)
        pooled = [
            _weighted(hidden, kept, mask) if mode == WEIGHTED else MODES[mode](hidden, kept)
            for mode in self.modes
        ]
        found: Tensor = self.rest(torch.cat(pooled, -1) if pooled else hidden)
        return found


@dataclass(frozen=True)
class _Place:
    """A module of modules.json.

    Attributes:
        kind: the last part of its type.
        library: the first part of it.
        folder: of its files.
    """

    kind: str
    library: str
    folder: Path

    @property
    def files(self) -> list[Path]:
        """Files that say what it computes, those that are there."""
        found = [self.folder / name for name in ("config.json", *WEIGHTS)]
        return [path for path in found if path.is_file()]

    @property
    def config(self) -> JsonObject:
        path = self.folder / "config.json"
        return read_json(path) if path.is_file() else {}


def read_modules(folder: Path) -> SentenceModules | None:
    """Return what is computed behind the model of a folder; None where nothing is.

    Raises:
        UsageError: a file cannot be read.
        UnsupportedModelError: a module that is not one of the above, settings that it does not
            have, or weights that do not fit.
    """
    if not (folder / MODULES).is_file():
        return None
    places = _places(folder)
    for path in (path for place in places[1:] for path in place.files):
        check_link(path)
    modes: Sequence[str] = ()
    takes_prompt = True
    rest: list[nn.Module] = []
    for place in places[1:]:
        if place.kind == "Pooling":
            if modes or rest:
                raise refuse(
                    folder / MODULES,
                    "a Pooling behind another module",
                    f"convert the base model alone, {POOL}",
                )
            modes = _modes(place)
            takes_prompt = place.config.get("include_prompt") is not False
        elif place.kind != "Dropout":
            rest.append(_built(place))
    # PyLate's models give vectors of length one without a module that says so.
    if any(place.library == "pylate" for place in places) and not modes:
        rest.append(Normalize())
    if not modes and not rest:
        return None
    files = [folder / MODULES, *(path for place in places[1:] for path in place.files)]
    return SentenceModules(modes, rest, files, takes_prompt)


def _places(folder: Path) -> list[_Place]:
    path = folder / MODULES
    check_link(path)
    listed: Any = read_json_value(path)
    known = isinstance(listed, list) and 0 < len(listed) <= MOST
    if not known or not all(isinstance(x, dict) for x in listed):
        raise refuse(path, f"no list of 1 to {MOST} modules", "save the model again")
    found = []
    for module in listed:
        kind, inner = module.get("type"), module.get("path", "")
        if not isinstance(kind, str) or not isinstance(inner, str) or Path(inner).is_absolute():
            raise refuse(path, "a module without a type or a folder", "save the model again")
        if ".." in Path(inner).parts:
            raise refuse(path, f"a module outside of its folder, {inner}", "save the model again")
        parts = kind.split(".")
        found.append(_Place(parts[-1], parts[0], folder / inner))
    if found[0].kind != "Transformer":
        raise refuse(
            path,
            f"{found[0].kind} as the first module; expected a Transformer",
            "convert a model of transformers that has these modules behind it",
        )
    return found


def _modes(place: _Place) -> Sequence[str]:
    config = place.config
    named: object = config.get("pooling_mode")
    if named is None:
        named = [mode for setting, mode in OLD_MODES.items() if config.get(setting)] or "mean"
    modes = [named] if isinstance(named, str) else named
    if not isinstance(modes, list) or not 1 <= len(modes) <= MOST or {*map(str, modes)} - {*MODES}:
        raise refuse(
            place.folder / "config.json",
            f"a pooling {named!r}; known are {', '.join(MODES)}",
            f"convert the base model alone, {POOL}",
        )
    return modes


def _built(place: _Place) -> nn.Module:
    if place.kind == "Normalize":
        return Normalize()
    config = place.config
    if place.kind == "Dense":
        module: nn.Module = _dense(place, config)
    elif place.kind == "LayerNorm":
        module = NamedLayerNorm(_size(place, config, "dimension"))
    else:
        raise refuse(
            place.folder,
            f"a module {place.kind}; known are Pooling, Dense, LayerNorm and Normalize",
            f"convert the base model alone, {POOL}, and compute the rest yourself",
        )
    weights = _weights(place)
    expected = module.state_dict()
    check_weights(
        place.folder,
        expected.keys() - weights.keys(),
        [
            (name, tuple(weights[name].shape), tuple(tensor.shape))
            for name, tensor in expected.items()
            if name in weights and weights[name].shape != tensor.shape
        ],
        weights.keys() - expected.keys(),
    )
    module.load_state_dict(dict(weights))
    return module.float()


def _dense(place: _Place, config: JsonObject) -> Dense:
    named = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if named not in ACTIVATIONS:
        raise refuse(
            place.folder / "config.json",
            f"an activation {named!r}; known are {', '.join(ACTIVATIONS)}",
            f"convert the base model alone, {POOL}, and compute the rest yourself",
        )
    sizes = tuple(_size(place, config, f"{side}_features") for side in ("in", "out"))
    bias, residual = bool(config.get("bias", True)), bool(config.get("use_residual", False))
    return Dense((sizes[0], sizes[1]), bias, ACTIVATIONS[named](), residual)


def _size(place: _Place, config: JsonObject, name: str) -> int:
    found = config.get(name)
    if isinstance(found, bool) or not isinstance(found, int) or not 0 < found <= 2**20:
        raise refuse(
            place.folder / "config.json",
            f"{name} {found!r}; expected a size",
            "save the model again",
        )
    return found


def _weights(place: _Place) -> Mapping[str, Tensor]:
    path = next((place.folder / n for n in WEIGHTS if (place.folder / n).is_file()), None)
    if path is None:
        raise refuse(place.folder, f"no {' or '.join(WEIGHTS)}", "save the model again")
    return read_weights(path).tensors
