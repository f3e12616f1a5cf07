"""AWQ in the layout of its matrix products (``gemm``): four bits, eight outputs in a word.

    qweight (inputs, outputs / 8)    qzeros (groups, outputs / 8)    scales (groups, outputs)
    w[o, i] = (q[i, o] - zero[g, o]) scales[g, o],    g = i // group size

The fields of a word, from its lowest bits, hold the outputs 0, 2, 4, 6, 1, 3, 5 and 7 of eight.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from linexport.sources.files import refuse
from linexport.sources.packed.record import PackedTensor, StoredTensor, blocks, unpack
from linexport.sources.packed.stored import StoredTensors
from linexport.system.json_object import JsonObject

TITLE = "AWQ"
METHODS = ("awq",)
IGNORED: tuple[str, ...] = ()

_BITS, _FIELDS = 4, 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Field of a word that holds each of eight outputs."""


def weights(
    stored: StoredTensors, settings: JsonObject, config: JsonObject
) -> Iterator[StoredTensor]:
    """Return the weights that have a tensor ``qweight``."""
    layout, bits = str(settings.get("version") or "gemm").lower(), settings.get("bits", _BITS)
    if layout != "gemm" or bits != _BITS:
        raise refuse(
            stored.folder,
            f"AWQ weights of {bits} bits in the layout {layout!r}; expected {_BITS} bits in 'gemm'",
            "take the checkpoint it was quantised from, or one of AWQ in that layout",
        )
    for stem in stored.stems(".qweight"):
        yield _weight(stored, stem, settings.get("group_size"))


def _weight(stored: StoredTensors, stem: str, group_size: object) -> StoredTensor:
    weight, zeros, scales = (f"{stem}.{part}" for part in ("qweight", "qzeros", "scales"))
    inputs, words = stored[weight].shape
    groups = stored.need(scales, weight).shape[0]
    stored.expect(scales, (groups, words * _FIELDS))
    stored.need(zeros, weight)
    stored.expect(zeros, (groups, words))
    size = stored.group_size(scales, inputs, groups, group_size)
    return StoredTensor(
        f"{stem}.weight",
        (words * _FIELDS, inputs),
        partial(_read, stored, weight, zeros, scales, size),
        frozenset({weight, zeros, scales}),
    )


def _read(stored: StoredTensors, weight: str, zeros: str, scales: str, size: int) -> PackedTensor:
    codes = _outputs(stored.read(weight))
    return PackedTensor(
        codes,
        scales=stored.read(scales).T,
        rows=torch.arange(len(codes)),
        columns=blocks(codes.shape[1], size),
        zeros=_outputs(stored.read(zeros)),
    )


def _outputs(words: Tensor) -> Tensor:
    """Return the integers of words in the order of the outputs: (outputs, rows of words)."""
    fields = unpack(words, _BITS).reshape(len(words), -1, _FIELDS)[..., list(_PLACES)]
    return fields.reshape(len(words), -1).T
