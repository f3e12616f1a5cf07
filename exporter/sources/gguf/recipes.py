"""Weights of a model made of the tensors of a GGUF file.

llama.cpp stores some weights otherwise than they are published: A for A_log, convolutions without
the size of 1, norms that add 1 with that 1, experts as one tensor. Each recipe undoes that.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor

from linexport.sources.files import refuse
from linexport.sources.gguf import types
from linexport.sources.gguf.file import GgufFile
from linexport.sources.packed import StoredWeights
from linexport.sources.packed.record import PackedTensor, StoredTensor
from linexport.system.json_object import JsonObject

Change = Callable[..., Tensor]
Names = Mapping[str, str]

_LAYER = re.compile(r"blk\.(\d+)\.(.*)")
_UNUSED = ("rope_freqs.weight", *(f"blk.0.time_mix_v{n}.weight" for n in range(3)))
"""Tensors that the configuration gives as well, or that no model reads: RWKV-7's first layer has no
values to mix its own with."""


@dataclass(frozen=True)
class Recipe:
    """A weight of a model.

    Attributes:
        name: that the class of transformers, or a checkpoint for it, has.
        parts: tensors of the file.
        change: computes it from them; None: it is the first.
        row: the entry of the first size of each that is taken; None: all of them.
    """

    name: str
    parts: tuple[str, ...]
    change: Change | None = None
    row: int | None = None

    def stored(self, file: GgufFile) -> StoredTensor:
        """Return the weight, to be read when it is used."""
        cut = 0 if self.row is None else 1
        empty = [torch.empty(file.shape(part)[cut:], device="meta") for part in self.parts]
        shape = tuple((self.change(*empty) if self.change else empty[0]).shape)
        return StoredTensor(
            self.name,
            shape,
            partial(self._read, file),
            frozenset(self.parts),
            partial(self._packed, file),
        )

    def _packed(self, file: GgufFile) -> PackedTensor | None:
        return None if self.change else file.packed(self.parts[0], self.row)

    def _read(self, file: GgufFile) -> Tensor:
        found = [file.read(part, self.row) for part in self.parts]
        return self.change(*found).contiguous() if self.change else found[0]


class ModelType(Protocol):
    """A layout: a module of ``types``."""

    ARCHITECTURES: tuple[str, ...]

    def configuration(self, file: GgufFile) -> JsonObject:
        """Return the settings of the class of transformers."""

    def recipes(self, file: GgufFile) -> Iterable[Recipe]:
        """Return the weights."""


@cache
def registered() -> dict[str, ModelType]:
    """Return every layout by the architectures that it is of."""
    found: dict[str, ModelType] = {}
    for module in pkgutil.iter_modules(types.__path__):
        kind: ModelType = importlib.import_module(f"{types.__name__}.{module.name}")
        found |= dict.fromkeys(kind.ARCHITECTURES, kind)
    return found


def weights_of(file: GgufFile, kind: ModelType) -> StoredWeights:
    """Return the weights of a file, none of which is read yet.

    Raises:
        UnsupportedModelError: it has tensors that the layout has no place for.
    """
    found = [recipe.stored(file) for recipe in kind.recipes(file)]
    used = {part for tensor in found for part in tensor.parts}
    unknown = sorted(
        name for name in file.tensors if name not in used and not _left_out(file, name)
    )
    if unknown:
        raise refuse(
            file.path,
            f"tensors that a model of type {file.architecture} has no place for: "
            f"{', '.join(unknown[:4])}",
            "give the folder of the model that the file was made of",
        )
    return StoredWeights((file.path,), {tensor.name: tensor for tensor in found}, "GGUF")


def _left_out(file: GgufFile, name: str) -> bool:
    layer = _LAYER.fullmatch(name)
    return name in _UNUSED or (layer is not None and int(layer[1]) >= file.layers)


def named(
    file: GgufFile, outer: Names, inner: Names, changes: Mapping[str, Change], prefix: str
) -> Iterator[Recipe]:
    """Return the recipes of tensors that are weights by another name.

    Args:
        file: of the tensors.
        outer: names of weights, by those of tensors.
        inner: the same within a layer, ``blk.N.``; ``{}`` is the number of an expert.
        changes: what is computed, by the names of tensors.
        prefix: of a layer's weights, with ``{}`` for its number.
    """
    for name in file.tensors:
        layer = _LAYER.fullmatch(name)
        if layer is not None and int(layer[1]) >= file.layers:
            continue
        key, place = (layer[2], prefix.format(layer[1])) if layer else (name, "")
        target = (inner if layer else outer).get(key)
        if target is None:
            continue
        change = changes.get(key)
        if "{}" not in target:
            yield Recipe(f"{place}{target}", (name,), change)
            continue
        for row in range(file.shape(name)[0]):
            yield Recipe(f"{place}{target.format(row)}", (name,), change, row)


def a_log(values: Tensor) -> Tensor:
    """Return A_log for A = -exp(A_log); A may have a last size of 1."""
    return torch.log(-values)


def without_last(values: Tensor) -> Tensor:
    """Return values without their last size, of 1."""
    return values.reshape(values.shape[0])


def a_log_of_heads(values: Tensor) -> Tensor:
    """Return A_log of heads, stored with a last size of 1."""
    return a_log(without_last(values))


def channels(values: Tensor) -> Tensor:
    """Return the kernels of a convolution of each channel by itself."""
    return values.unsqueeze(1)


def flat(values: Tensor) -> Tensor:
    """Return a norm that is stored by groups."""
    return values.reshape(-1)


def lowered(values: Tensor) -> Tensor:
    """Return the weight of a norm that multiplies by 1 + weight."""
    return values - 1


def halves(heads: int, values: Tensor) -> Tensor:
    """Return rows of heads by halves, (2, n), that are stored by pairs of neighbours, (n, 2)."""
    rows = values.reshape(heads, -1, 2, *values.shape[1:])
    return rows.transpose(1, 2).reshape(values.shape)


def stacked(*values: Tensor) -> Tensor:
    """Return rows of several tensors as one."""
    return torch.cat(values, -2)


MAMBA = {
    "ssm_a": a_log,
    "ssm_conv1d.weight": channels,
}
"""Changes of Mamba's weights."""

MAMBA2 = {
    "ssm_a": a_log_of_heads,
    "ssm_d": without_last,
    "ssm_conv1d.weight": channels,
    "ssm_norm.weight": flat,
}
"""Changes of Mamba2's weights."""
