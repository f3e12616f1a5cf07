"""Blocks of a GGUF file as integers with scales.

    w = scale code + offset

The codes of a block are the values that the package gguf reads where its scales are 1 and its
offset is 0; its scales are those that it reads where all codes are 1. So the layout of a type is
the places of these numbers, and how a 1 is written there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from linexport.sources.packed.record import PackedTensor, blocks

_ONE = b"\x00\x3c"
"""1 in half precision."""


@dataclass(frozen=True)
class BlockLayout:
    """A type of blocks.

    Attributes:
        group: values that share a scale.
        scales: bytes that make every scale 1, by the place of the first of them.
        codes: bytes that make every code 1.
        offset: place of the offset in half precision; None: there is none.
    """

    group: int
    scales: dict[int, bytes]
    codes: dict[int, bytes]
    offset: int | None = None


LAYOUTS = {
    "Q4_0": BlockLayout(32, {0: _ONE}, {2: b"\x99" * 16}),
    "Q4_1": BlockLayout(32, {0: _ONE}, {4: b"\x11" * 16}, offset=2),
    "Q5_0": BlockLayout(32, {0: _ONE}, {2: b"\xff" * 4 + b"\x11" * 16}),
    "Q5_1": BlockLayout(32, {0: _ONE}, {4: b"\x00" * 4 + b"\x11" * 16}, offset=2),
    "Q8_0": BlockLayout(32, {0: _ONE}, {2: b"\x01" * 32}),
    "Q3_K": BlockLayout(
        16, {96: b"\x11" * 8 + b"\xaa" * 4 + _ONE}, {0: b"\xff" * 32 + b"\x55" * 64}
    ),
    "Q6_K": BlockLayout(16, {192: b"\x01" * 16 + _ONE}, {0: b"\x11" * 128 + b"\xaa" * 64}),
}
"""Types by name: those whose scales and codes are one number each."""


def packed(data: NDArray[np.uint8], kind: Any) -> PackedTensor | None:
    """Return the integers, scales and offsets of rows of blocks; None for other types.

    Args:
        data: (..., bytes of a row).
        kind: type of the package gguf.
    """
    import gguf

    layout = LAYOUTS.get(getattr(kind, "name", ""))
    if layout is None:
        return None
    rows = np.ascontiguousarray(data).reshape(-1, data.shape[-1])
    own = rows.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    offsets = None
    if layout.offset is not None:
        halves = own[:, layout.offset : layout.offset + 2].copy().view(np.float16)
        offsets = torch.from_numpy(halves.reshape(len(rows), -1))
        own = _with(own, {layout.offset: b"\x00\x00"})
    codes = gguf.dequantize(_with(own, layout.scales).reshape(rows.shape), kind)
    scales = gguf.dequantize(_with(own, layout.codes).reshape(rows.shape), kind)
    return PackedTensor(
        torch.from_numpy(codes.astype(np.int8)),
        torch.from_numpy(np.ascontiguousarray(scales[:, :: layout.group])),
        torch.arange(len(rows)),
        blocks(codes.shape[1], layout.group),
        offsets=offsets,
    )


def _with(own: NDArray[np.uint8], written: dict[int, bytes]) -> NDArray[np.uint8]:
    """Return a copy of blocks with other bytes at some places."""
    changed = own.copy()
    for place, content in written.items():
        changed[:, place : place + len(content)] = np.frombuffer(content, np.uint8)
    return changed
