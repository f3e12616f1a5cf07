"""GPTQ, as AutoGPTQ and GPTQModel write it: integers by input, with a scale for groups of inputs.

    qweight (inputs bits / 32, outputs)     qzeros (groups, outputs bits / 32)
    scales (groups, outputs)                g_idx (inputs): group of each input
    w[o, i] = (q[i, o] - zero[g[i], o]) scales[g[i], o]

Version 1 stores zero - 1. Its writers subtract one in each field of a word, with borrows from the
next field, and so one is added to all fields of the word at once.
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

TITLE = "GPTQ"
METHODS = ("gptq",)
IGNORED: tuple[str, ...] = ()

_BITS = (2, 3, 4, 8)
_VERSIONS = {"gptq": 1, "gptq_v2": 0}
"""Amounts that zeros are stored lower by, for each checkpoint format."""

_ADVICE = "convert it with GPTQModel to the format gptq, or take the checkpoint it was made from"


def weights(
    stored: StoredTensors, settings: JsonObject, config: JsonObject
) -> Iterator[StoredTensor]:
    """Return the weights that have a tensor ``qweight``."""
    layout = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    layout = "marlin" if settings.get("is_marlin_format") else layout
    if layout not in _VERSIONS:
        known = ", ".join(_VERSIONS)
        raise refuse(
            stored.folder, f"GPTQ weights in the format {layout!r}; expected {known}", _ADVICE
        )
    bits = settings.get("bits")
    if bits not in _BITS:
        raise refuse(stored.folder, f"GPTQ weights of {bits} bits; read are {_BITS}", _ADVICE)
    for stem in stored.stems(".qweight"):
        yield _weight(stored, stem, bits, _VERSIONS[layout], settings.get("group_size"))


def _weight(
    stored: StoredTensors, stem: str, bits: int, lower: int, group_size: object
) -> StoredTensor:
    names = {p: f"{stem}.{p}" for p in ("qweight", "qzeros", "scales")}
    words, outputs = stored[names["qweight"]].shape
    inputs = words * 32 // bits
    groups = stored.need(names["scales"], names["qweight"]).shape[0]
    stored.expect(names["scales"], (groups, outputs))
    stored.need(names["qzeros"], names["qweight"])
    stored.expect(names["qzeros"], (groups, -(-outputs * bits // 32)))
    if f"{stem}.g_idx" in stored:
        names["g_idx"] = f"{stem}.g_idx"
        stored.expect(names["g_idx"], (inputs,))
    size = inputs
    if "g_idx" not in names:
        size = stored.group_size(names["scales"], inputs, groups, group_size)
    return StoredTensor(
        f"{stem}.weight",
        (outputs, inputs),
        partial(_read, stored, names, bits, lower, size),
        frozenset(names.values()),
    )


def _read(
    stored: StoredTensors, names: dict[str, str], bits: int, lower: int, size: int
) -> PackedTensor:
    scales = stored.read(names["scales"]).T
    codes = unpack(stored.read(names["qweight"]).T, bits)
    inputs, (outputs, groups) = codes.shape[1], scales.shape
    zeros = _zeros(stored.read(names["qzeros"]), bits, lower)[:, :outputs]
    columns = blocks(inputs, size)
    if "g_idx" in names:
        columns = stored.read(names["g_idx"]).long()
        if not bool(((columns >= 0) & (columns < groups)).all()):
            raise stored.wrong(f"{names['g_idx']} names groups that {names['scales']} has not")
    return PackedTensor(codes, scales, torch.arange(outputs), columns, zeros.T)


def _zeros(words: Tensor, bits: int, lower: int) -> Tensor:
    if lower and 32 % bits == 0:
        one = sum(1 << shift for shift in range(0, 32, bits))
        return unpack((words.long() + one).to(torch.int32), bits)
    return (unpack(words, bits) + lower) & ((1 << bits) - 1)  # fields of 3 bits lie across words
