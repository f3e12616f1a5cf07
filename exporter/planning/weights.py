"""Weights of a model as planning counts them: bytes by kind, and bytes that a step reads.

    float32    4 bytes            fp16    2 bytes
    int8, int4 values in blocks with float32 scales and zero points, as convert writes them;
               products in int4 have no zero points, and tables are in int8

A step reads every product whole, one row of a table for each token, and of experts those that the
tokens chose.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from linexport.quantization.block_quantisation import Grid
from linexport.quantization.quantisable import (
    BLOCK,
    LEAST_INPUTS,
    LEAST_OUTPUTS,
    MIXED_BITS,
    TABLE_BITS,
)

Kind = Literal["float32", "fp16", "int8", "int4"]
KINDS: tuple[Kind, ...] = ("float32", "fp16", "int8", "int4")

BITS = {"int8": 8, "int4": 4}

Role = Literal["product", "table", "tied", "experts", "other"]


@dataclass(frozen=True)
class PlannedWeight:
    """One weight.

    Attributes:
        name: as the model has it.
        role: "product" is read whole in a step, a "table" is looked up, a "tied" one is both;
            "other" weights, such as norms, are never stored in 8 or 4 bits.
        outputs, inputs: its shape, those of all experts together; vectors have one input.
        experts: in all, 1 for other weights.
        chosen: experts of a token.
    """

    name: str
    role: Role
    outputs: int
    inputs: int
    experts: int = 1
    chosen: int = 1

    @property
    def quantisable(self) -> bool:
        """Return whether convert stores it in 8 or 4 bits."""
        large = self.outputs >= LEAST_OUTPUTS and self.inputs >= LEAST_INPUTS
        return self.role != "other" and large

    def size(self, kind: Kind) -> int:
        """Return its bytes."""
        elements = self.outputs * self.inputs
        if kind == "fp16" and self.inputs > 1:
            return 2 * elements
        if kind in BITS and self.quantisable:
            looked_up = self.role in ("table", "tied")
            bits = max(BITS[kind], TABLE_BITS if looked_up else 0)
            symmetric = bits == min(MIXED_BITS) and self.role == "product"
            return self.outputs * Grid(bits, BLOCK, symmetric).row_bytes(self.inputs)
        return 4 * elements

    def part_read(self, tokens: int) -> float:
        """Return the part of it that a step of so many tokens reads."""
        if self.role == "table":
            return min(1.0, tokens / self.outputs)
        return min(1.0, tokens * self.chosen / self.experts)


def size(weights: Iterable[PlannedWeight], kind: Kind) -> int:
    """Return the bytes of all weights."""
    return sum(weight.size(kind) for weight in weights)


def bytes_read(weights: Iterable[PlannedWeight], kind: Kind, tokens: int) -> float:
    """Return the bytes that a step of so many tokens reads of all weights."""
    return sum(weight.size(kind) * weight.part_read(tokens) for weight in weights)
