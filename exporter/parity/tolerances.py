"""The distance a converted model may be from its original, and why: the one place for it.

Errors are measured against the largest magnitude of the reference output: with r the reference and
a the artifact's output, max|a - r| <= absolute + relative * max|r|.

float32: every output is a sum of products whose order differs between the two programs. Each
rounding contributes 2^-24 = 6e-8 of a term, and errors of a sum of n terms grow like sqrt(n): for
n of the order of 10^5 (a product of width 10^3 in each of some tens of layers, prefix sums of 10^4
tokens) that is 2e-5. The limit is about twice this. A wrong epsilon, mask, decay or chunk border
gives errors of 1e-3 and more.

Some functions lose more than that by themselves: an exponent of 4e4 carries a rounding of 4e-3, and
a vanishing sum of large terms none of its digits. So where that is more, the artifact, which rounds
elsewhere, may be off by ``ROUNDING`` times the distance of the original's float32 output from its
own float64 output, and never by more than ``MAX_EXCUSED_SHARE`` of the largest value: an original
that loses more than that to rounding cannot be distinguished from a wrong one. The report says so
where it applies. Of a language model it is the worst distance in any case that is off by more than
the tolerance: where a norm divides by nearly nothing, a token or two have most of it. So no token
may be off by more than ``SPREAD`` times as much as what rounding does to that token allows. That is
known of the one run in float32, in which it may be little by chance, and of random roundings, see
``parity.noise.random_rounding``: with m_t what is known of token t and m the worst distance,

    |a_t - r_t| <= max(absolute + relative * max|r|, ROUNDING * min(max(m_t, m), SPREAD * m_t))

Half precision is judged by the original in that precision as float32 is by float64: an artifact in
it may be off by ``HALF_ROUNDING`` times the original's own distance from float32, however large
that is. From the original in half precision it may be off by both distances together.

A model that computes a part of itself in half precision, and gives float32, is compared as it is,
within the limits of that precision: both programs round there, each to its own side.

A model that quantises values is compared as one in float32. But rounding moves a value that lies
between two steps by a whole one, which may be any share of the largest output: an artifact may be
off by twice what that moves the original, however large it is. Where the original's own run in
float64 turned no such value, inputs that are moved by several roundings tell what turns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import onnx

Rounding = TypeVar("Rounding", float, np.ndarray)


@dataclass(frozen=True)
class Tolerance:
    """Limits for one dtype; ``why`` is printed with them.

    ``whole`` is false where only values inside of the model have that dtype.
    """

    dtype: str
    relative: float
    absolute: float
    why: str
    whole: bool = True

    @property
    def is_half(self) -> bool:
        """True where the artifact is in half precision, which the original is then run in, too."""
        return self.dtype != "float32" and self.whole

    @property
    def second(self) -> str:
        """The precision that tells what the original itself loses to rounding."""
        return self.dtype if self.is_half else "float64"

    @property
    def factor(self) -> float:
        """Times that loss the artifact may be off."""
        if self.dtype == STEPS:
            return 2.0
        return HALF_ROUNDING if self.is_half else ROUNDING

    @property
    def most(self) -> float:
        """Share of the largest value beyond which that loss excuses nothing."""
        return math.inf if self.is_half or self.dtype == STEPS else MAX_EXCUSED_SHARE

    @property
    def cap(self) -> str:
        """The words of a note for ``most``; none without such a share."""
        return f", and by {self.most:.0%} at most" if math.isfinite(self.most) else ""

    @property
    def spread(self) -> float:
        """Times what is known to move a token that others may be moved."""
        return math.inf if self.is_half else SPREAD

    def beside(self, moved: np.ndarray, lost: float) -> np.ndarray:
        """Return the rounding to allow for at each token.

        Args:
            moved: how far rounding is known to move each.
            lost: the most that the original itself loses at any.
        """
        with np.errstate(invalid="ignore"):
            most = np.nan_to_num(self.spread * moved, nan=np.inf, posinf=np.inf)
        return np.minimum(np.maximum(moved, lost), most)

    def limit(self, magnitude: float, rounding: float = 0.0) -> float:
        """The largest difference allowed.

        Args:
            magnitude: of the reference, max|r|.
            rounding: how far the original in the ``second`` precision is from float32.
        """
        plain = self.absolute + self.relative * magnitude
        return max(plain, min(self.factor * rounding, self.most * magnitude if magnitude else 0.0))

    def between(self, rounding: Rounding) -> Rounding:
        """Return the rounding to allow for against the original in the ``second`` precision.

        That one is exact where it is float64. In half precision it is off by ``rounding`` itself.
        """
        return rounding * (1 + 1 / self.factor) if self.is_half else rounding


ROUNDING = 4.0
"""Distances between the original in float32 and in float64 that an artifact may be off."""

SPREAD = 4.0
"""Times what is known to move a token that it may be taken to be moved, where others are moved as
far: a state that is rounded at every token loses a few times what sums over all tokens lose.
"""

MAX_EXCUSED_SHARE = 0.02
"""Share of the largest value beyond which rounding of the original excuses nothing."""

HALF_ROUNDING = 1.25
"""Distances between the original in half precision and in float32 that an artifact may be off. Two
programs that round alike are equally far off but for chance, of which the largest error has some.
"""

STEPS = "int8"
"""The dtype inside of models that quantise values, to whatever integers."""

TOLERANCES = {
    "float32": Tolerance(
        "float32",
        5e-5,
        1e-6,
        "Sums are taken in another order: rounding of 6e-8 a term grows to about 2e-5 over 1e5 "
        "terms; twice that is allowed, relative to the largest output. A wrong epsilon, mask or "
        "chunk border gives 1e-3 and more.",
    ),
    STEPS: Tolerance(
        STEPS,
        5e-5,
        1e-6,
        "As in float32; a value between two steps of its quantisation may go to either.",
    ),
    "float16": Tolerance(
        "float16",
        5e-3,
        1e-4,
        "Activations carry 11 bits: rounding of 5e-4 a step over some tens of layers.",
    ),
    "bfloat16": Tolerance(
        "bfloat16",
        4e-2,
        1e-3,
        "Activations carry 8 bits: rounding of 4e-3 a step over some tens of layers.",
    ),
}


def coarsest_inside(graph: onnx.GraphProto) -> str:
    """Return the coarsest floating-point dtype of the values in a graph, or ``STEPS``."""
    if any(node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear") for node in graph.node):
        return STEPS
    values = [*graph.input, *graph.output, *graph.value_info]
    kinds = {value.type.tensor_type.elem_type for value in values}
    kinds |= {tensor.data_type for tensor in graph.initializer}
    casts = [node for node in graph.node if node.op_type == "Cast"]
    kinds |= {a.i for node in casts for a in node.attribute if a.name == "to"}
    names = {onnx.TensorProto.BFLOAT16: "bfloat16", onnx.TensorProto.FLOAT16: "float16"}
    return next((name for kind, name in names.items() if kind in kinds), "float32")
