"""Weights of a model as planning counts them: bytes by kind, and bytes that a step reads.

    float32    4 bytes            fp16    2 bytes
    int8, int4, fp8    values, scales and zero points as convert writes them for the target; tables
                       have 8 bits

Of a target for GPUs scales, and the weights that keep their type, are in fp16, as with
``--precision fp16``.

A step reads every product whole, one row of a table for each token, and of experts those that the
tokens chose.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from linexport.quantization.by_target import FORMS, form_of
from linexport.quantization.quantisable import (
    LEAST_INPUTS,
    LEAST_OUTPUTS,
    TABLE_BITS,
    Experts,
    Use,
    Weight,
)

Kind = Literal["float32", "fp16", "int8", "int4", "fp8"]
KINDS: tuple[Kind, ...] = ("float32", "fp16", "int8", "int4")
"""Kinds that every target has."""

BITS = {"int8": 8, "int4": 4, "fp8": 8}

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
        """Return whether it is one to store in 8 or 4 bits."""
        large = self.outputs >= LEAST_OUTPUTS and self.inputs >= LEAST_INPUTS
        return self.role != "other" and large

    def size(self, kind: Kind, target: str = "ort") -> int:
        """Return its bytes."""
        elements, on_cpu = self.outputs * self.inputs, FORMS[target].on_cpu
        stays = self.role == "experts" and FORMS[target].experts == "none"
        if kind in BITS and self.quantisable and not stays:
            form, own = form_of(target, kind), self._weight()
            bits = max(BITS[kind], TABLE_BITS if own.is_table else 0)
            grid = form.grid(own, bits, "float32" if on_cpu else "float16")
            return self.outputs * grid.row_bytes(self.inputs)
        half = kind == "fp16" or (kind in BITS and not on_cpu)
        return (2 if half and self.inputs > 1 else 4) * elements

    def _weight(self) -> Weight:
        """Return it as convert finds it, as far as its storage depends on it."""
        use = Use(0, self.name, False, None, is_lookup=self.role in ("table", "tied"))
        experts = None
        if self.role == "experts":
            experts = Experts(self.experts, self.chosen, fused=False, alternates=False, share="")
        return Weight(self.name, (use,), self.outputs, self.inputs, experts=experts)

    def part_read(self, tokens: int) -> float:
        """Return the part of it that a step of so many tokens reads."""
        if self.role == "table":
            return min(1.0, tokens / self.outputs)
        return min(1.0, tokens * self.chosen / self.experts)


def size(weights: Iterable[PlannedWeight], kind: Kind, target: str = "ort") -> int:
    """Return the bytes of all weights."""
    return sum(weight.size(kind, target) for weight in weights)


def bytes_read(
    weights: Iterable[PlannedWeight], kind: Kind, tokens: int, target: str = "ort"
) -> float:
    """Return the bytes that a step of so many tokens reads of all weights."""
    return sum(weight.size(kind, target) * weight.part_read(tokens) for weight in weights)
