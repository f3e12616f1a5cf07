"""CausalConvWithState of the CPU library against the float64 oracle."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from linexport.plugins.ops.causal_conv import ACTIVATIONS, causal_conv
from linexport.targets.base import OrtSession
from linexport.targets.cpu_fusion import with_programs
from tests.support.comparison import assert_close
from tests.support.native import check_in_place, on_library, one_node, session
from tests.support.runtimes import Arrays

OUTPUTS = ("output", "present_state")


def model(
    channels: int, size: int, bias: bool, past: bool, activation: str = "none"
) -> onnx.ModelProto:
    shapes: dict[str, tuple[int | str, ...]]
    shapes = {"input": ("B", channels, "T"), "weight": (channels, 1, size)}
    if bias:
        shapes["bias"] = (channels,)
    if past:
        shapes["past_state"] = ("B", channels, size - 1)
    return one_node("CausalConvWithState", shapes, OUTPUTS, activation=activation)


def inputs(made: onnx.ModelProto, batch: int, length: int, scale: float = 1.0) -> Arrays:
    rng, sizes = np.random.default_rng(length), {"B": batch, "T": length}
    x = {}
    for value in made.graph.input:
        dims = [sizes.get(d.dim_param, d.dim_value) for d in value.type.tensor_type.shape.dim]
        x[value.name] = np.float32(scale * rng.normal(size=dims))
    return x


@pytest.mark.smoke
@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(
    channels=st.one_of(st.integers(1, 40), st.sampled_from([64, 255, 256])),
    size=st.integers(1, 9),
    flags=st.tuples(st.booleans(), st.booleans()),
    activation=st.sampled_from(ACTIVATIONS),
    batch=st.integers(0, 3),
    length=st.one_of(st.integers(0, 12), st.sampled_from([64, 65, 200])),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    threads=st.integers(1, 4),
)
def test_equals_oracle(
    channels: int,
    size: int,
    flags: tuple[bool, bool],
    activation: str,
    batch: int,
    length: int,
    scale: float,
    threads: int,
) -> None:
    made = model(channels, size, *flags, activation)
    x = inputs(made, batch, length, scale)
    with np.errstate(over="ignore"):
        want = causal_conv(activation, **{n: a.astype(np.float64) for n, a in x.items()})
    largest = causal_conv("none", **{n: np.abs(a).astype(np.float64) for n, a in x.items()})
    got = on_library(made, threads)(x)
    # silu's slope is at most 1.1, and it is 0 where its argument is far below.
    assert_close(got, want, [largest[0] + np.abs(want[0]), np.abs(want[1])], 1e-6, 1e-37)


def between_transposes(made: onnx.ModelProto) -> onnx.ModelProto:
    """The same on tokens before channels, as models have it."""
    graph, turned = made.graph, {"perm": [0, 2, 1]}
    given = graph.input[0].type.tensor_type.shape
    dims = [given.dim[0], given.dim[2], given.dim[1]]
    del graph.input[0].type.tensor_type.shape.dim[:]
    graph.input[0].type.tensor_type.shape.dim.extend(dims)
    [node] = [n for n in graph.node if n.domain]
    node.input[0] = "turned"
    [cast] = [n for n in graph.node if n.output[0] == "output"]
    cast.CopyFrom(helper.make_node("Transpose", cast.input, cast.output, **turned))
    graph.node.insert(0, helper.make_node("Transpose", ["input"], ["turned"], **turned))
    return made


@pytest.mark.smoke
@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(
    channels=st.one_of(st.integers(1, 40), st.sampled_from([64, 255, 300])),
    size=st.integers(1, 9),
    flags=st.tuples(st.booleans(), st.booleans()),
    activation=st.sampled_from(ACTIVATIONS),
    batch=st.integers(0, 3),
    length=st.one_of(st.integers(0, 12), st.sampled_from([64, 65, 200])),
    threads=st.integers(1, 4),
)
def test_tokens_before_channels(
    channels: int,
    size: int,
    flags: tuple[bool, bool],
    activation: str,
    batch: int,
    length: int,
    threads: int,
) -> None:
    x = inputs(model(channels, size, *flags, activation), batch, length)
    wide = {n: a.astype(np.float64) for n, a in x.items()}
    want = causal_conv(activation, **wide)
    largest = causal_conv("none", **{n: np.abs(a) for n, a in wide.items()})
    fused = with_programs(between_transposes(model(channels, size, *flags, activation)))
    assert [n.op_type for n in fused.graph.node if n.domain] == ["CausalConvTokens"]
    fed = {**x, "input": x["input"].transpose(0, 2, 1)}
    got = on_library(fused, threads)(fed)
    got[0] = got[0].transpose(0, 2, 1)
    assert_close(got, want, [largest[0] + np.abs(want[0]), np.abs(want[1])], 1e-6, 1e-37)
    if x["input"].size == 0:  # which ONNX Runtime's Conv refuses
        return
    by_function = OrtSession(fused.SerializeToString(), 1).run(fed)
    np.testing.assert_allclose(by_function["output"].transpose(0, 2, 1), want[0], 1e-4, 1e-5)


@pytest.mark.parametrize("size, length", [(2, 1), (3, 1), (4, 1), (5, 1), (4, 2), (4, 3), (4, 40)])
def test_states_in_place(size: int, length: int) -> None:
    """Past and present bound to the same memory."""
    made = model(7, size, True, True, "silu")
    check_in_place(made, inputs(made, 2, length))


@pytest.mark.parametrize("length", [1, 200])
def test_same_bits_whatever_the_threads(length: int) -> None:
    made = model(2048, 4, True, True, "silu")
    x = inputs(made, 1, length)
    alone, *others = (on_library(made, threads)(x) for threads in (1, 2, 3))
    for other in others:
        for one, two in zip(alone, other, strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    "name, shape",
    [
        ("weight", (2, 1, 4)),
        ("weight", (3, 2, 4)),
        ("weight", (3, 1, 0)),
        ("bias", (2,)),
        ("past_state", (1, 3, 4)),
        ("past_state", (2, 3, 3)),
    ],
)
def test_wrong_shapes_are_refused(name: str, shape: tuple[int, ...]) -> None:
    made = model(3, 4, True, True)
    x = inputs(made, 1, 5)
    for value in made.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            dim.dim_param = f"{value.name}_{id(dim)}"
    opened = session(made)
    opened.run(None, x)
    with pytest.raises(Exception, match="CausalConvWithState"):
        opened.run(None, {**x, name: np.ones(shape, np.float32)})


def test_unknown_activations_are_refused() -> None:
    made = model(3, 4, True, True)
    made.graph.node[0].attribute[0].s = b"gelu"
    with pytest.raises(Exception, match="unknown activation"):
        session(made)
