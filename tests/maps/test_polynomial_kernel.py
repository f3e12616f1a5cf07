"""The polynomial map's kernel in float32: as near as Horner's rule, whatever the coefficients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from linexport.errors import UsageError
from linexport.models.feature_maps import make
from linexport.models.feature_maps.polynomial import LARGEST, Polynomial, centred
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter

EPS = float(np.finfo(np.float32).eps)

magnitudes = st.one_of(st.just(0.0), st.floats(-8, 8).map(lambda e: 10.0**e))
coefficients = st.lists(magnitudes, min_size=2, max_size=6).filter(lambda a: a[-1] > 0)
powers = st.builds(
    lambda c, n, change: [
        math.comb(n, m) * c ** (n - m) * (1 + change * (m == n)) for m in range(n + 1)
    ],
    st.floats(1e-3, 1e3),
    st.integers(2, 5),
    st.sampled_from([0.0, 1e-7, -1e-7, 1e-6, 1e-3]),
)
"""(t + c)^n, all but exactly."""


def in_float32(a: Sequence[float], t: np.ndarray) -> np.ndarray:
    """The kernel as the graph computes it."""
    stored, b = centred(a), Body()
    (made,) = [Polynomial.kappa_onnx(b, "t", 1, *[Parameter("p", stored.shape)] * 3)]
    graph = onnx.helper.make_graph(
        b.nodes,
        "kernel",
        [onnx.helper.make_tensor_value_info(n, 1, [None]) for n in ("t", "p")],
        [onnx.helper.make_tensor_value_info(made, 1, [None])],
    )
    opset = [onnx.helper.make_opsetid("", 18)]
    model = onnx.helper.make_model(graph, opset_imports=opset)
    return np.asarray(ReferenceEvaluator(model).run(None, {"t": t, "p": stored})[0])


def points(a: Sequence[float]) -> np.ndarray:
    """Products near 0, near the centre, and of the size at which two powers are equal."""
    sizes = [1.0, a[-2] / (len(a) - 1) / a[-1]]
    sizes += [
        (x / y) ** (1 / (j - i))
        for i, x in enumerate(a)
        for j, y in enumerate(a)
        if i < j and x and y
    ]
    around = np.concatenate([-np.geomspace(2, 1e-3, 25), [0.0], np.geomspace(1e-3, 2, 25)])
    return np.concatenate([s * around for s in sizes if 1e-9 < s < 1e9]).astype(np.float32)


@settings(max_examples=60)
@given(st.one_of(coefficients, powers))
@example([1.0, 1.0, 1e-3])
@example([1.0, 1.0, 1e-5])
@example([1.0, 2.0, 1.0])
@example([1.0, 2.0, 1.0000005])
@example([1.0, 1.0, 1e-45])
def test_no_digits_are_lost_to_the_form_of_the_polynomial(a: list[float]) -> None:
    t = points(a)
    wide = t.astype(np.float64)
    want, size = (np.polynomial.polynomial.polyval(x, a) for x in (wide, np.abs(wide)))
    assume(size.max() < 1e30)
    error = np.abs(in_float32(a, t) - want)
    # Horner's rule: one rounding for each of 2 n operations, and one of each coefficient.
    assert (error <= (2 * len(a)) * EPS * size).all()


def test_squares_are_computed_about_their_centre() -> None:
    """(t + c)^2 near -c is small, and its three terms are not."""
    t = np.linspace(-1.01, -0.99, 101, dtype=np.float32)
    want = (t.astype(np.float64) + 1) ** 2
    assert np.abs(in_float32([1.0, 2.0, 1.0], t) - want).max() < 4 * EPS * want.max()
    horner = np.float32(1) + t * (np.float32(2) + t * np.float32(1))
    assert np.abs(horner - want).max() > 100 * EPS * want.max()


def test_the_largest_coefficients_are_those_whose_features_are_finite() -> None:
    squares = make("polynomial", 4, {"coefficients": [1.0, 0.0, LARGEST / 2]}).frozen()[1]
    assert squares.isfinite().all()
    for more in ([0.6 * LARGEST], [1e39], [float("nan")], [1.0] * 200):
        with pytest.raises(UsageError, match="expected two to 33 numbers"):
            make("polynomial", 4, {"coefficients": [1.0, 0.0, *more]})
