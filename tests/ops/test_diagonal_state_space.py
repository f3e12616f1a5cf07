"""DiagonalStateSpace: its oracle against the convolution, and its ONNX body and PyTorch."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from linexport.errors import OpError
from linexport.plugins.ops.diagonal_state_space import OP, check, diagonal_state_space
from linexport.plugins.ops.diagonal_state_space.definition import eager
from linexport.plugins.ops.diagonal_state_space.portable import CHUNK
from linexport.plugins.ops.registry import attach_functions

Arrays = dict[str, np.ndarray]

ELEMENTS = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
ROUNDING = {"float32": 3e-6, "float16": 1e-3}


def weights(seed: int, heads: int, poles: int, turns: bool) -> Arrays:
    """Rates that keep everything, that keep nothing, that grow a little, and others."""
    draw = np.random.default_rng(seed)
    x = {"rate": -draw.exponential(0.1, (heads, poles)), "cosine": draw.normal(size=(heads, poles))}
    x["rate"].flat[:3] = (0.0, -np.inf, 1e-3)[: x["rate"].size]
    x = {name: value.astype(np.float32) for name, value in x.items()}
    if turns:
        x["sine"] = draw.normal(size=(heads, poles)).astype(np.float32)
        x["angle"] = draw.uniform(-2, 2, (heads, poles))
    return x


def values(seed: int, x: Arrays, length: int, d_v: int, past: bool) -> Arrays:
    draw = np.random.default_rng(seed)
    heads, poles = x["rate"].shape
    given = {"input": draw.normal(size=(2, length, heads * d_v))}
    if past:
        given["past_state"] = draw.normal(size=(2, heads, poles * (2 if "angle" in x else 1), d_v))
    return {name: value.astype(np.float32) for name, value in given.items()}


def model(x: Arrays, d_v: int, past: bool, dtype: str = "float32") -> onnx.ModelProto:
    """One node, with its weights stored."""
    heads, poles = x["rate"].shape
    state = ["B", heads, poles * (2 if "angle" in x else 1), d_v]
    tensors = {"input": ["B", "T", heads * d_v], **({"past_state": state} if past else {})}
    kinds = {"input": ELEMENTS[dtype], "past_state": TensorProto.FLOAT}
    names = [n if n in x or n in tensors else "" for n in OP.input_names]
    node = helper.make_node(OP.name, names, OP.output_names, "node", domain="linexport")
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(n, kinds[n], shape) for n, shape in tensors.items()],
        [
            helper.make_tensor_value_info("output", ELEMENTS[dtype], tensors["input"]),
            helper.make_tensor_value_info("present_state", TensorProto.FLOAT, state),
        ],
        [numpy_helper.from_array(value, name) for name, value in x.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("linexport", 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    attach_functions(made)
    return made


def run(made: onnx.ModelProto, given: Arrays) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(made.SerializeToString(), options)
    found: list[np.ndarray] = session.run(None, given)
    return found


def check_close(got: np.ndarray, expected: np.ndarray, limit: float) -> None:
    assert got.shape == expected.shape
    largest = np.abs(expected).max(initial=1e-30)
    assert np.abs(got - expected).max(initial=0.0) <= limit * largest


@pytest.mark.parametrize("turns", [False, True])
def test_the_oracle_is_a_convolution(turns: bool) -> None:
    x = weights(0, 2, 3, turns)
    given = values(1, x, 9, 2, past=False)
    factor = np.exp(x["rate"].astype(np.float64) + 2j * np.pi * x.get("angle", 0.0))
    weight = x["cosine"] + 1j * x.get("sine", 0.0)
    kernel = np.stack([(weight * factor**t).sum(1).real for t in range(9)])
    u = given["input"].reshape(2, 9, 2, 2).astype(np.float64)
    expected = np.zeros(u.shape)
    for t in range(9):
        for s in range(t + 1):
            expected[:, t] += kernel[t - s][:, None] * u[:, s]
    output, _ = diagonal_state_space(**given, **x)
    np.testing.assert_allclose(output, expected.reshape(output.shape), rtol=1e-12, atol=1e-12)


def test_a_state_by_hand() -> None:
    """A quarter of a turn at half the size: from 1 to i/2 to -1/4."""
    x = {"rate": np.log([[0.5]]), "cosine": np.ones((1, 1)), "sine": np.full((1, 1), 2.0)}
    given = {"input": np.array([[[1.0], [0.0], [0.0]]]), "angle": np.array([[0.25]])}
    output, state = diagonal_state_space(**x, **given)
    np.testing.assert_allclose(output[0, :, 0], [1, -1, -0.25], atol=1e-15)
    np.testing.assert_allclose(state[0, 0, :, 0], [-0.25, 0], atol=1e-15)


@settings(max_examples=12, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_the_body_equals_the_oracle(data: st.DataObject) -> None:
    heads, poles, d_v = (data.draw(st.integers(1, 3)) for _ in range(3))
    turns, past = data.draw(st.booleans()), data.draw(st.booleans())
    dtype = data.draw(st.sampled_from(sorted(ELEMENTS)))
    x = weights(data.draw(st.integers(0, 99)), heads, poles, turns)
    made = model(x, d_v, past, dtype)
    for length in (0, 1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 2):
        given = values(length, x, length, d_v, past)
        given["input"] = given["input"].astype(dtype)
        wide = {name: value.astype(np.float64) for name, value in (x | given).items()}
        for got, expected in zip(run(made, given), diagonal_state_space(**wide), strict=True):
            check_close(got, expected, ROUNDING[dtype])


def test_a_slow_rate_is_not_rounded_away() -> None:
    """1 - e^(-3.2e-6) of a chunk has two digits in float32, where the difference is rounded."""
    x = {"rate": np.full((1, 1), -1e-7, np.float32), "cosine": np.ones((1, 1), np.float32)}
    length = 200_000
    output, _ = run(model(x, 1, past=False), {"input": np.ones((1, length, 1), np.float32)})
    rate = np.float64(x["rate"][0, 0])
    expected = np.expm1(rate * np.arange(1, length + 1)) / np.expm1(rate)
    error = np.abs(output[0, :, 0] / expected - 1).max()
    assert error < 5e-6


@pytest.mark.parametrize("turns", [False, True])
def test_pytorch_equals_the_oracle(turns: bool) -> None:
    x = weights(3, 2, 3, turns)
    given = values(4, x, 7, 2, past=True)
    wide = {name: value.astype(np.float64) for name, value in (x | given).items()}
    tensors = (torch.from_numpy(wide[n]) if n in wide else None for n in OP.input_names)
    for got, expected in zip(eager(*tensors), diagonal_state_space(**wide), strict=True):
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"rate": (2, "n")}, "expected heads and poles, fixed"),
        ({"cosine": (3, 4)}, "cosine has heads 3; expected 2"),
        ({"input": (1, 5, 7)}, "a multiple of its 2 heads"),
        ({"sine": (2, 4)}, "of sine and angle one is given"),
        ({"past_state": (1, 2, 8, 3)}, "past_state has poles 8; expected 4"),
    ],
)
def test_shapes_that_contradict_each_other(shapes: dict[str, tuple], message: str) -> None:
    known = {"input": (1, 5, 6), "rate": (2, 4), "cosine": (2, 4)}
    with pytest.raises(OpError, match=message):
        check(**(known | shapes))
