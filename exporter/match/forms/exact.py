"""Elementwise functions of one number, evaluated with so many digits that rounding hides nothing.

    f = phi    where |f(x) - phi(x)| <= RELATIVE |phi(x)| at every probe x

In float32 elu(x) + 1 + 1e-7 and elu(x) + 1 cannot be distinguished; with 100 digits they differ by
1e-7, and at x = -30 that is a million times the value. A bound such as the 1e4 of
clamp(relu(x), max=1e4) shows on one side of it only, so probes are chosen by reading the function:
both neighbours of each constant, numbers well beyond it, both neighbours of each x at which a
comparison changes its outcome, and all magnitudes of float32.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import mpmath
import numpy as np
import onnx
from onnx import helper, numpy_helper

from linexport.graph.operators import BOUNDS, COMPARISONS

DIGITS = 100
"""1 + exp(x) - 1 keeps the digits of exp(x) as far down as float32 goes."""

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)
"""Below it hardware may give 0."""

RELATIVE = 2e-6
"""Constants such as log 2 are stored in float32; a different function is off by more somewhere."""

GRID = np.concatenate(
    [
        np.linspace(-12, 12, 193),
        [s * x for s in (-1, 1) for x in (15.5, 20, 30, 40, 60, 80, 88, 90)],
    ]
).astype(np.float32)
"""The region where maps bend: both sides of every usual threshold."""

MAGNITUDES = np.array([float(f"1e{n}") for n in range(-38, 39)] + [LARGEST], np.float32)

Number = Any
"""A real number of ``mpmath``."""


def _exp(x: Number) -> Number:
    # exp of a number with more than 40 digits does not fit in memory.
    return mpmath.exp(x) if abs(x) < 1e40 else mpmath.mpf("inf" if x > 0 else 0)


def _periodic(function: Callable[[Number], Number]) -> Callable[[Number], Number]:
    """Return the function, NaN beyond float32: a remainder of pi needs every digit of its number.

    sin(exp(1e30)) would take digits without end; in float32 it is the sine of infinity.
    """
    return lambda x: function(x) if abs(x) <= LARGEST else mpmath.mpf("nan")


def _rounded(function: Callable[[Number], Number]) -> Callable[[Number], Number]:
    """Return the function where numbers can have a fraction in float32; beyond, they are whole."""
    return lambda x: function(x) if abs(x) <= LARGEST else x


def _log(x: Number) -> Number:
    return mpmath.log(x) if x > 0 else mpmath.mpf("-inf" if x == 0 else "nan")


def _sigmoid(x: Number) -> Number:
    return 1 / (1 + _exp(-x))


def _softplus(x: Number) -> Number:
    return _log(1 + _exp(x))


def _elu(x: Number, alpha: float = 1.0) -> Number:
    return x if x > 0 else alpha * (_exp(x) - 1)


def _selu(
    x: Number, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875
) -> Number:
    return gamma * _elu(x, alpha)


def _celu(x: Number, alpha: float = 1.0) -> Number:
    return x if x > 0 else alpha * (_exp(x / alpha) - 1)


def _gelu(x: Number, approximate: bytes | str = "none") -> Number:
    if approximate in (b"none", "none"):
        return x * (1 + mpmath.erf(x / mpmath.sqrt(2))) / 2
    inside = mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3)
    return x * (1 + mpmath.tanh(inside)) / 2


def _hard_sigmoid(x: Number, alpha: float = 0.2, beta: float = 0.5) -> Number:
    return max(mpmath.mpf(0), min(mpmath.mpf(1), alpha * x + beta))


def _pow(x: Number, exponent: Number) -> Number:
    real = x >= 0 or exponent == int(exponent)
    return x**exponent if real and (x or exponent >= 0) else mpmath.mpf("nan")


def _clip(x: Number, low: Number | None = None, high: Number | None = None) -> Number:
    x = x if low is None else max(x, low)
    return x if high is None else min(x, high)


OPERATORS: Mapping[str, Callable[..., Any]] = {
    "Abs": abs,
    "Add": operator.add,
    "And": lambda a, b: a and b,
    "Cast": lambda x, to: x,
    "CastLike": lambda x, _: x,
    "Ceil": _rounded(mpmath.ceil),
    "Celu": _celu,
    "Clip": _clip,
    "Cos": _periodic(mpmath.cos),
    "Div": lambda a, b: a / b if b else mpmath.mpf("nan"),
    "Elu": _elu,
    "Equal": operator.eq,
    "Erf": mpmath.erf,
    "Exp": _exp,
    "Floor": _rounded(mpmath.floor),
    "Gelu": _gelu,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": lambda x: x * _hard_sigmoid(x, mpmath.mpf(1) / 6),
    "Identity": lambda x: x,
    "LeakyRelu": lambda x, alpha=0.01: x if x > 0 else alpha * x,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Log": _log,
    "Max": max,
    "Min": min,
    "Mish": lambda x: x * mpmath.tanh(_softplus(x)),
    "Mul": operator.mul,
    "Neg": operator.neg,
    "Not": operator.not_,
    "Or": lambda a, b: a or b,
    "Pow": _pow,
    "Reciprocal": lambda x: 1 / x if x else mpmath.mpf("nan"),
    "Relu": lambda x: max(x, mpmath.mpf(0)),
    "Round": _rounded(mpmath.nint),
    "Selu": _selu,
    "Sigmoid": _sigmoid,
    "Sign": mpmath.sign,
    "Sin": _periodic(mpmath.sin),
    "Softplus": _softplus,
    "Softsign": lambda x: x / (1 + abs(x)),
    "Sqrt": lambda x: mpmath.sqrt(x) if x >= 0 else mpmath.mpf("nan"),
    "Sub": operator.sub,
    "Sum": lambda *x: sum(x, mpmath.mpf(0)),
    "Tanh": mpmath.tanh,
    "ThresholdedRelu": lambda x, alpha=1.0: x if x > alpha else mpmath.mpf(0),
    "Where": lambda condition, a, b: a if condition else b,
}

COMPARING = COMPARISONS | BOUNDS
"""Operators whose outcome changes where their first input meets another."""


class Exact:
    """A function of one number, given as ONNX nodes.

    Args:
        nodes: in order; they read ``x`` and constants of their own alone.
        result: name of the value they compute.

    Raises:
        NotImplementedError: it has an operator that is not elementwise.
    """

    def __init__(self, nodes: Sequence[onnx.NodeProto], result: str) -> None:
        self._result = result
        self._fixed: dict[str, Number] = {}
        self._steps: list[tuple[str, list[str], str, dict[str, object]]] = []
        for node in nodes:
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            if node.op_type == "Constant":
                array = numpy_helper.to_array(attributes["value"])
                if array.size != 1:
                    raise NotImplementedError("a constant of several numbers")
                self._fixed[node.output[0]] = mpmath.mpf(float(array.reshape(())))
            elif node.op_type in OPERATORS:
                step = (node.op_type, list(node.input), node.output[0], attributes)
                self._steps.append(step)
            else:
                raise NotImplementedError(node.op_type)

    def __call__(self, x: float) -> Number:
        """f(x)."""
        return self._values(x)[self._result]

    @property
    def constants(self) -> list[float]:
        """Every number in the function: bounds, thresholds, what is added, attributes."""
        attributes = [
            v for _, _, _, found in self._steps for v in found.values() if isinstance(v, float)
        ]
        return [*(float(c) for c in self._fixed.values()), *attributes]

    def probes(self) -> list[float]:
        """Numbers of float32, ascending, at which this function is compared with another."""
        chosen = {float(x) for x in (*GRID, *MAGNITUDES, *-MAGNITUDES)} | {0.0}
        for constant in self.constants:
            if not 0 < abs(constant) <= LARGEST:
                continue
            # A constant may be a bound of x, or of -x where x was negated first; or a bound of a
            # multiple of x, which half, twice and ten times it look for.
            for c in (np.float32(constant), np.float32(-constant)):
                chosen |= {float(np.nextafter(c, np.float32(s * np.inf))) for s in (-1, 1)}
                chosen |= {
                    float(c * np.float32(f)) for f in (0.5, 1, 2, 10) if abs(c) < LARGEST / 10
                }
        points = sorted(chosen)
        if not any(op in COMPARING for op, *_ in self._steps):
            return points
        with mpmath.workdps(DIGITS):
            outcomes = [(x, self._outcomes(x)) for x in points]
            edges = [
                edge
                for (low, before), (high, after) in pairwise(outcomes)
                if before != after
                for edge in self._edges(low, high, before)
            ]
        return sorted({*points, *edges})

    def _edges(self, low: float, high: float, before: list[int]) -> tuple[float, float]:
        """Neighbours in float32 between which comparisons begin to differ from those at ``low``."""
        # Piecewise functions differ where their pieces meet. One change of outcomes is looked for
        # between two probes, which are dense where maps bend.
        first, last = _place(low), _place(high)
        while last - first > 1:
            middle = (first + last) // 2
            if self._outcomes(_at(middle)) == before:
                first = middle
            else:
                last = middle
        return _at(first), _at(last)

    def _outcomes(self, x: float) -> list[int]:
        values, found = self._values(x), list[int]()
        for op, inputs, _, _ in self._steps:
            if op in COMPARING:
                first, *others = (values[name] for name in inputs if name)
                found += [int(first > other) - int(first < other) for other in others]
        return found

    def _values(self, x: float) -> dict[str, Number]:
        values = {**self._fixed, "x": mpmath.mpf(x), "": None}
        for op, inputs, output, attributes in self._steps:
            values[output] = OPERATORS[op](*(values[name] for name in inputs), **attributes)
        return values


def first_difference(function: Exact, other: Exact, probes: Sequence[float]) -> float | None:
    """The first probe at which two functions differ; None if there is none."""
    with mpmath.workdps(DIGITS):
        return next((x for x in probes if not _agree(function(x), other(x))), None)


def _agree(a: Number, b: Number) -> bool:
    # A NaN here means that the value is not known, which proves no equality.
    if mpmath.isnan(a) or mpmath.isnan(b):
        return False
    if abs(b) > LARGEST:  # infinite in float32, and so must be the other
        return bool(abs(a) > LARGEST and (a > 0) == (b > 0))
    return bool(abs(a - b) <= RELATIVE * abs(b) + SMALLEST)


def _place(x: float) -> int:
    """The position of a float32 among all of them, in ascending order."""
    bits = int(np.float32(x).view(np.int32))
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


def _at(place: int) -> float:
    """The inverse of ``_place``."""
    size = float(np.int32(abs(place)).view(np.float32))
    return size if place >= 0 else -size
