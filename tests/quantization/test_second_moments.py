"""Sums over calibration data, and the weights that inexact inputs need, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from linexport.quantization.gptq import RIDGE, CalibratedInputs
from linexport.quantization.opened import COLUMNS, SecondMoments


@pytest.mark.parametrize("width", [3, COLUMNS, COLUMNS + 1, 2 * COLUMNS + 7])
def test_means_are_those_of_all_rows(width: int) -> None:
    random = np.random.default_rng(width)
    moments, errors = SecondMoments(), SecondMoments()
    x = random.standard_normal((2, 9, width)).astype(np.float32)
    y = random.standard_normal((2, 9, width)).astype(np.float32)
    for one, other in zip(x, y, strict=True):
        moments.add("x", one)
        errors.add("x", one, other)
    rows, others = (v.reshape(-1, width).astype(np.float64) for v in (x, y))
    for found, want in (
        (moments.means()["x"], rows.T @ rows / len(rows)),
        (errors.means()["x"], rows.T @ others / len(rows)),
    ):
        np.testing.assert_allclose(found, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("outputs", [5, 40])
def test_weights_for_inexact_inputs(outputs: int) -> None:
    """W + W E[(x - y) y^T] (E[y y^T] + c I)^-1, of fewer outputs than inputs and of more."""
    random = np.random.default_rng(outputs)
    y = random.standard_normal((200, 24))
    x = y + 0.3 * random.standard_normal((200, 24)) @ random.standard_normal((24, 24))
    weights = random.standard_normal((outputs, 24)).astype(np.float32)
    moment, errors = y.T @ y / 200, (x - y).T @ y / 200
    ridge = RIDGE * np.trace(moment) / 24
    want = weights + weights @ errors @ np.linalg.inv(moment + ridge * np.eye(24))
    for inputs in (
        CalibratedInputs(moment, errors),
        CalibratedInputs(moment, None, {"W": weights @ errors}),
    ):
        found = inputs.target("W", weights)
        assert found.dtype == np.float32 and not inputs.exact
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_errors_of_outputs_are_those_of_inputs_through_the_weights() -> None:
    """E[W (x - y) y^T], of fewer outputs than inputs."""
    random = np.random.default_rng(0)
    apart, y = random.standard_normal((2, 2, 9, 30)).astype(np.float32)
    weights = random.standard_normal((4, 30)).astype(np.float32)
    found = SecondMoments()
    for one, other in zip(apart, y, strict=True):
        found.add("W", one @ weights.T, other)
    want = weights @ apart.reshape(18, 30).T @ y.reshape(18, 30) / 18
    np.testing.assert_allclose(found.means()["W"], want, rtol=0, atol=2e-5)
