"""Block-wise quantisation: its definition, ONNX Runtime's reading of it, and what GPTQ gains."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from linexport.quantization.block_quantisation import Grid, Quantised, nearest
from linexport.quantization.gptq import (
    OUTPUTS,
    RIDGE,
    STEP,
    TOGETHER,
    CalibratedInputs,
    gptq,
)

GRIDS = [Grid(bits, block, s) for bits in (4, 8) for block in (16, 32, 64) for s in (False, True)]
LOOKED_UP = [grid for grid in GRIDS if not grid.symmetric]


def drawn(outputs: int, inputs: int, seed: int) -> np.ndarray:
    """Rows of different magnitudes, some of them of one sign and some zero."""
    random = np.random.default_rng(seed)
    matrix = random.standard_normal((outputs, inputs)) * random.lognormal(0, 2, (outputs, 1))
    matrix[::3] = np.abs(matrix[::3])
    matrix[1::7] = 0
    return matrix.astype(np.float32)


def by_loops(quantised: Quantised) -> np.ndarray:
    """(q - z) s, one value at a time, in float64."""
    block, inputs = quantised.grid.block, quantised.inputs
    rows = [
        [
            (int(quantised.values[n, k // block, k % block]) - int(quantised.zeros[n, k // block]))
            * float(quantised.scales[n, k // block])
            for k in range(inputs)
        ]
        for n in range(len(quantised.values))
    ]
    return np.asarray(rows)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 150), st.sampled_from(GRIDS), st.integers(0, 2**16))
def test_values_are_within_half_a_step_of_the_weights(
    outputs: int, inputs: int, grid: Grid, seed: int
) -> None:
    matrix = drawn(outputs, inputs, seed)
    found = nearest(matrix, grid)
    np.testing.assert_allclose(found.matrix(), by_loops(found), rtol=1e-6, atol=1e-30)
    stored = found.packed()
    assert ("zeros" in stored) == (not grid.symmetric)
    assert sum(array.nbytes for array in stored.values()) == outputs * grid.row_bytes(inputs)
    padded = np.pad(matrix, ((0, 0), (0, grid.blocks(inputs) * grid.block - inputs)))
    blocks = padded.reshape(outputs, -1, grid.block)
    reach = np.maximum(blocks.max(-1), 0) - np.minimum(blocks.min(-1), 0)
    if grid.symmetric:
        reach = np.abs(blocks).max(-1) * grid.top / grid.middle * 2
    # Plain rounding over the whole range errs by half a step at most; the chosen scale is better.
    plain = (reach / grid.top / 2) ** 2 * grid.block
    wrong = np.pad((found.matrix() - matrix) ** 2, ((0, 0), (0, padded.shape[1] - inputs)))
    assert (wrong.reshape(blocks.shape).sum(-1) <= 1.01 * plain + 1e-30).all()


def session_of(quantised: Quantised, gather: bool) -> onnxruntime.InferenceSession:
    """One MatMulNBits with float32 activations, or one GatherBlockQuantized."""
    arrays = quantised.packed()
    grid = quantised.grid
    stored = {"bits": grid.bits, "block_size": grid.block, "domain": "com.microsoft"}
    if gather:
        arrays["values"] = arrays["values"].reshape(len(quantised.values), -1)
        names = ["values", "x", "scales", "zeros"]
        node = helper.make_node("GatherBlockQuantized", names, ["y"], quantize_axis=1, **stored)
        given_type, shape = TensorProto.INT64, ["n"]
    else:
        sizes = {"K": quantised.inputs, "N": len(quantised.values), "accuracy_level": 1}
        node = helper.make_node("MatMulNBits", ["x", *arrays], ["y"], **stored, **sizes)
        given_type, shape = TensorProto.FLOAT, ["n", quantised.inputs]
    graph = helper.make_graph(
        [node],
        "alone",
        [helper.make_tensor_value_info("x", given_type, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return onnxruntime.InferenceSession(onnx.ModelProto.SerializeToString(model))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("inputs", [32, 80, 96, 100])
def test_onnx_runtime_reads_the_same_matrix(grid: Grid, inputs: int) -> None:
    found = nearest(drawn(40, inputs, inputs), grid)
    x = np.random.default_rng(0).standard_normal((3, inputs)).astype(np.float32)
    [y] = session_of(found, gather=False).run(None, {"x": x})
    expected = x.astype(np.float64) @ by_loops(found).T
    np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("grid", LOOKED_UP, ids=str)
def test_onnx_runtime_looks_up_the_same_rows(grid: Grid) -> None:
    found = nearest(drawn(40, 128, 5), grid)
    rows = np.asarray([3, 0, 39, 3])
    [y] = session_of(found, gather=True).run(None, {"x": rows})
    np.testing.assert_array_equal(y, found.matrix()[rows])


@pytest.mark.parametrize("inputs", [64, 90])
def test_gptq_errs_less_where_inputs_vary_together(inputs: int) -> None:
    random = np.random.default_rng(1)
    mixing = random.standard_normal((inputs, inputs)) * random.lognormal(0, 1, inputs)
    x = random.standard_normal((4000, inputs)) @ mixing
    matrix = random.standard_normal((48, inputs)).astype(np.float32)

    def error(found: Quantised) -> float:
        return float((((found.matrix() - matrix) @ x.T) ** 2).sum())

    plain = error(nearest(matrix, Grid(4, 32)))
    assert error(gptq(matrix, Grid(4, 32), CalibratedInputs(x.T @ x / len(x)))) < 0.75 * plain


def test_gptq_of_independent_inputs_of_one_size_is_rounding() -> None:
    """Values are the nearest for their scales, which are better than those of rounding alone."""
    matrix = drawn(12, 64, 3)
    found, plain = (
        gptq(matrix, Grid(4, 32), CalibratedInputs(np.eye(64))),
        nearest(matrix, Grid(4, 32)),
    )
    scales, zeros = found.scales[..., None], found.zeros[..., None]
    rows = matrix.reshape(12, 2, 32)
    with np.errstate(invalid="ignore"):
        expected = np.clip(np.rint(rows / scales) + zeros, 0, 15)
    different = expected != found.values
    assert different.mean() < 0.01
    error, before = (((q.matrix() - matrix) ** 2).sum() for q in (found, plain))
    assert error <= before


def test_inputs_that_never_occur_do_no_harm() -> None:
    moment = np.zeros((40, 40))
    moment[:8, :8] = np.eye(8)
    found = gptq(drawn(6, 40, 2), Grid(4, 16), CalibratedInputs(moment))
    assert np.isfinite(found.matrix()).all()


def test_inputs_of_very_different_sizes_gain_most() -> None:
    """Scales and zero points are chosen by what an error of each input costs."""
    random = np.random.default_rng(0)
    inputs = 128
    mixing = random.standard_normal((inputs, inputs)) / inputs**0.5 / 2 + np.eye(inputs)
    x = random.standard_normal((2000, inputs)) @ (mixing * random.lognormal(0, 1, inputs))
    matrix = random.standard_normal((64, inputs)).astype(np.float32)

    def error(found: Quantised) -> float:
        return float((((found.matrix() - matrix) @ x.T) ** 2).sum())

    plain = error(nearest(matrix, Grid(4, 32)))
    assert error(gptq(matrix, Grid(4, 32), CalibratedInputs(x.T @ x / len(x)))) < 0.65 * plain


@pytest.mark.parametrize("symmetric", [False, True])
def test_no_value_of_gptq_could_be_better_alone(symmetric: bool) -> None:
    """Every weight one step up or down, all others as they are, errs no less."""
    random = np.random.default_rng(4)
    inputs, grid = 64, Grid(4, 32, symmetric)
    x = random.standard_normal((500, inputs)) @ random.standard_normal((inputs, inputs))
    moment = x.T @ x / len(x) + 0.01 * np.diag(x.T @ x / len(x)).mean() * np.eye(inputs)
    matrix = random.standard_normal((5, inputs)).astype(np.float32)
    found = gptq(matrix, grid, CalibratedInputs(x.T @ x / len(x)))
    wrong = by_loops(found) - matrix
    worse = better = 0
    for row, column in np.ndindex(wrong.shape):
        block = column // grid.block
        before = wrong[row] @ moment @ wrong[row]
        for step in (-1, 1):
            if 0 <= int(found.values[row, block, column % grid.block]) + step <= grid.top:
                moved = wrong[row].copy()
                moved[column] += step * float(found.scales[row, block])
                change = moved @ moment @ moved - before
                better, worse = better + (change < -1e-9 * before), worse + (change >= 0)
    # The last scales came after some of the values, so that a few may have moved since.
    assert worse > 0 and better <= 0.02 * worse


@pytest.mark.parametrize("inputs", [TOGETHER - 16, 2 * TOGETHER + 88])
@pytest.mark.parametrize("block", [32, 2 * STEP, 1024])
def test_values_are_those_of_algorithm_1_in_float64(inputs: int, block: int) -> None:
    """Each input rounded, and all that follow corrected at once, with the scales that were found.

    A float32 sum that is half a step from two values may go to either, and then so may what
    follows: outputs err as little.
    """
    random = np.random.default_rng(5)
    grid = Grid(4, block, symmetric=True)
    x = random.standard_normal((900, inputs)) @ random.standard_normal((inputs, inputs))
    calibrated = CalibratedInputs(x.T @ x / len(x))
    matrix = random.standard_normal((20, inputs)).astype(np.float32)
    found = gptq(matrix, grid, calibrated, descends=False)

    padded = grid.blocks(inputs) * grid.block
    moment = calibrated.damped(padded)
    factor = np.linalg.cholesky(np.linalg.inv(moment)).T
    weights = np.pad(matrix.astype(np.float64), ((0, 0), (0, padded - inputs)))
    left, values = weights.copy(), np.empty(weights.shape)
    for k in range(padded):
        scale = found.scales[:, k // block]
        values[:, k] = np.clip(np.rint(left[:, k] / scale), -8, 7)
        wrong = left[:, k] - values[:, k] * scale
        left[:, k + 1 :] -= np.outer(wrong / factor[k, k], factor[k, k + 1 :])
    same = values[:, :inputs] == found.values.reshape(len(matrix), -1)[:, :inputs] - 8.0
    assert same[:, 0].all()
    errors = []
    for own in (values * np.repeat(found.scales, block, 1), found.matrix()):
        apart = own[:, :inputs] - matrix
        errors.append(((apart @ moment[:inputs, :inputs]) * apart).sum())
    assert same.mean() > 0.9
    np.testing.assert_allclose(errors[1], errors[0], rtol=0.01)


def test_outputs_do_not_depend_on_those_rounded_with_them() -> None:
    random = np.random.default_rng(7)
    x = random.standard_normal((200, 40)) @ random.standard_normal((40, 40))
    matrix = random.standard_normal((OUTPUTS + 3, 40)).astype(np.float32)
    inputs, grid = CalibratedInputs(x.T @ x / len(x)), Grid(4, 16)
    whole, last = (gptq(own, grid, inputs).matrix() for own in (matrix, matrix[-2:]))
    np.testing.assert_allclose(whole[-2:], last, rtol=0, atol=1e-6)


def test_a_moment_without_a_factor_in_float32_has_one() -> None:
    """Inputs of which one is a million times another: both are corrected for."""
    random = np.random.default_rng(6)
    x = random.standard_normal((500, 8)) * 10.0 ** np.arange(8)
    x[:, 1] = x[:, 0] + 1e-9 * x[:, 1]
    matrix = random.standard_normal((3, 8)).astype(np.float32)
    inputs = CalibratedInputs(x.T @ x, 0.1 * x.T @ x)
    assert np.isfinite(inputs.factor(16)).all()
    assert np.isfinite(inputs.target("", matrix)).all()


def test_weights_for_inexact_inputs_give_what_exact_ones_give() -> None:
    """Beside least squares over the samples themselves, with the ridge as further rows."""
    random = np.random.default_rng(4)
    x = random.standard_normal((500, 24)) @ random.standard_normal((24, 24))
    y = x + 0.3 * random.standard_normal((500, 24)) @ random.standard_normal((24, 24))
    matrix = random.standard_normal((8, 24)).astype(np.float32)
    moment = y.T @ y / len(y)
    errors = (x - y).T @ y / len(y)
    found = CalibratedInputs(moment, errors).target("", matrix)
    ridge = (RIDGE * np.trace(moment) / 24 * len(y)) ** 0.5 * np.eye(24)
    targets = np.concatenate([x @ matrix.T, ridge @ matrix.T])
    expected = np.linalg.lstsq(np.concatenate([y, ridge]), targets, rcond=None)[0].T
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    same = CalibratedInputs(moment, np.zeros((24, 24))).target("", matrix)
    np.testing.assert_array_equal(same, matrix)
    nothing = CalibratedInputs(0 * moment, errors)
    np.testing.assert_array_equal(nothing.target("", matrix), matrix)
