"""Gated convolutions on channels before tokens, which the CPU library gets the other way round."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from linexport.plugins.ops.causal_conv import causal_conv
from linexport.plugins.ops.registry import attach_functions, register_schemas
from linexport.targets.base import OrtSession
from linexport.targets.cpu_fusion import with_programs
from linexport.targets.cpu_fusion.chains import with_chains
from linexport.targets.cpu_fusion.layouts import with_tokens_first
from tests.support.comparison import assert_close
from tests.support.native import check_in_place, session
from tests.support.runtimes import Arrays

CHANNELS = 24

TEXT = """
    <ir_version: 10, opset_import: ["": 20, "linexport": 1]>
    gated (float[B, T, 72] y, float[B, 24, 2] past_conv)
        => (float[B, T, 24] z, float[B, 24, 2] present_conv)
        <float[B, 72, T] t, float[B, 24, T] b, float[B, 24, T] c, float[B, 24, T] x,
         float[B, 24, T] bx, float[B, 24, T] o, float[B, 24, T] s, float[B, 24, T] g,
         float[B, T, 24] u>
    {
        t = Transpose<perm = [0, 2, 1]>(y)
        b, c, x = Split<axis = 1>(t, sizes)
        bx = Mul(b, x)
        o, present_conv = linexport.CausalConvWithState<activation = "none">(bx, w, , past_conv)
        s = Sigmoid(c)
        g = Mul(s, o)
        u = Transpose<perm = [0, 2, 1]>(g)
        z = Neg(u)
    }
"""

WEIGHT = np.float32(np.random.default_rng(0).normal(size=(CHANNELS, 1, 3)))


def gated() -> onnx.ModelProto:
    register_schemas()
    model = parser.parse_model(TEXT)
    sizes = np.full(3, CHANNELS)
    for name, values in {"w": WEIGHT, "sizes": sizes}.items():
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    attach_functions(model)
    return model


def feeds(batch: int, length: int) -> Arrays:
    rng = np.random.default_rng(length)
    shapes = {"y": (batch, length, 3 * CHANNELS), "past_conv": (batch, CHANNELS, 2)}
    return {name: np.float32(rng.normal(size=shape)) for name, shape in shapes.items()}


def reference(given: Arrays) -> list[np.ndarray]:
    y = np.float64(given["y"]).transpose(0, 2, 1)
    b, c, x = np.split(y, 3, axis=1)
    o, present = causal_conv("none", b * x, WEIGHT, None, given["past_conv"])
    return [-(o / (1 + np.exp(-c))).transpose(0, 2, 1), present]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 40])
def test_equals_float64(batch: int, length: int) -> None:
    x, fused = feeds(batch, length), with_chains(with_programs(gated()))
    assert [node.op_type for node in fused.graph.node] == ["Chain"]
    want = reference(x)
    scales = [1 + np.abs(y) for y in want]
    assert_close(session(fused, 2).run(None, x), want, scales, 1e-6)
    for model in (fused, with_tokens_first(gated())) if length else ():  # Conv takes no empty one
        by_function = OrtSession(model.SerializeToString(), 1).run(x).values()
        assert_close([*by_function], want, scales, 1e-6)


def test_states_in_place() -> None:
    check_in_place(with_chains(with_programs(gated())), feeds(2, 1))


@pytest.mark.parametrize("name", ["t", "b", "bx", "o", "g"])
def test_what_others_read_in_its_layout_stays(name: str) -> None:
    """As an output of the graph, and as what another node reads."""
    model = gated()
    shape = ["B", 3 * CHANNELS if name == "t" else CHANNELS, "T"]
    model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    assert with_tokens_first(model) is model
    del model.graph.output[-1]
    model.graph.node.append(helper.make_node("Elu", [name], ["e"]))
    model.graph.output.append(helper.make_tensor_value_info("e", TensorProto.FLOAT, shape))
    assert with_tokens_first(model) is model


def test_a_gate_of_another_layout_stays() -> None:
    model = gated()
    model.graph.input.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, ["B", 24, "T"]))
    model.graph.node[5].input[1] = "h"
    assert with_tokens_first(model) is model
