"""Bytes that a graph holds at once, compared with values that ONNX Runtime computes."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper, parser

from linexport.graph.footprint import Footprint

HEAD = '<ir_version: 9, opset_import: ["": 20]>'
SCORES = """
s = Shape(x) one = Constant<value_ints=[1]>() zero = Constant<value_ints=[0]>()
two = Constant<value_ints=[2]>() rest = Constant<value_ints=[4, -1]>()
lead = Slice(s, zero, two) wide = Concat<axis=0>(lead, rest) heads = Reshape(x, wide)
q = Transpose<perm=[0, 2, 1, 3]>(heads) k = Transpose<perm=[0, 2, 3, 1]>(heads)
a = MatMul(q, k) p = Softmax(a) o = MatMul(p, q) back = Transpose<perm=[0, 2, 1, 3]>(o)
y = Reshape(back, s)
"""
BRANCHES = """
n = Shape<start=1, end=2>(x) most = Constant<value_ints=[20]>() short = LessOrEqual(n, most)
flat = Squeeze(short)
y = If(flat) <then_branch = t () => (a) { xt = Transpose<perm=[0, 2, 1]>(x) b = MatMul(x, xt)
a = MatMul(b, x) }, else_branch = e () => (c) { c = Neg(x) }>
"""
RANGES = """
n = Shape<start=1, end=2>(x) c = Squeeze(n) i = Constant<value_int=0>() j = Constant<value_int=1>()
r = Range(i, c, j) column = Unsqueeze(r, one) near = LessOrEqual(r, column)
m = Where(near, low, high) xt = Transpose<perm=[0, 2, 1]>(x) a = MatMul(x, xt) b = Add(a, m)
y = MatMul(b, x)
"""
LOOPS = """
n = Shape<start=1, end=2>(x) c = Squeeze(n) going = Constant<value_ints=[1]>()
yes = Cast<to=9>(going) more = Squeeze(yes)
last, all = Loop(c, more, x) <body = b (int64 i, bool g, float[B, T, 8] s) => (g2, s2, out)
{ g2 = Identity(g) s2 = Neg(s) out = ReduceSum<keepdims=0>(s) }>
y = Identity(last)
"""
CONSTANTS = "int64[1] one = {1}, float low = {0.0}, float high = {-1.0}"
GRAPHS = {"scores": SCORES, "branches": BRANCHES, "ranges": RANGES, "loops": LOOPS}


def made(text: str) -> onnx.ModelProto:
    head = f"{HEAD} g (float[B, T, 8] x) => (float[B, T, 8] y) <{CONSTANTS}>"
    return parser.parse_model(f"{head} {{ {text} }}")


def measured(model: onnx.ModelProto, batch: int, tokens: int) -> dict[str, int]:
    """Bytes of every value of the outer graph, as ONNX Runtime computes it."""
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    names = [name for node in shown.graph.node for name in node.output]
    del shown.graph.output[:]
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(shown.SerializeToString(), options)
    values = session.run(None, {"x": np.ones((batch, tokens, 8), np.float32)})
    return {name: value.nbytes for name, value in zip(names, values, strict=True)}


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(sorted(GRAPHS)), st.integers(1, 3), st.integers(1, 60))
def test_it_is_no_less_than_any_value_and_no_more_than_all(
    name: str, batch: int, tokens: int
) -> None:
    model = made(GRAPHS[name])
    values = measured(model, batch, tokens)
    found = Footprint(model).at({"B": batch, "T": tokens})
    inside = batch * (tokens**2 + 8 * tokens) * 4 + 8
    assert max(values.values()) <= found <= sum(values.values()) + inside


def test_scores_of_all_pairs_are_counted_and_what_was_read_is_not() -> None:
    """Two values of scores at once; eight layers hold no more than one."""
    one = Footprint(made(SCORES)).at({"B": 2, "T": 1000})
    layers = SCORES
    for i in range(7):
        again = SCORES.replace(" x", f" y{i}").replace("(x", f"(y{i}")
        for name in ("s", "one", "zero", "two", "rest", "lead", "wide", "heads", *"qkapo", "back"):
            again = again.replace(f"{name} =", f"{name}_{i} =")
            for before, after in (("(", ","), ("(", ")"), (", ", ","), (", ", ")")):
                again = again.replace(f"{before}{name}{after}", f"{before}{name}_{i}{after}")
        layers = layers.replace("y =", f"y{i} =") + again
    eight = Footprint(made(layers)).at({"B": 2, "T": 1000})
    assert pytest.approx(one, rel=0.01) == 2 * 2 * 4 * 1000**2 * 4
    assert eight < 1.02 * one


def test_the_branch_that_is_taken_is_counted() -> None:
    found = Footprint(made(BRANCHES))
    assert found.at({"B": 1, "T": 20}) > 20**2 * 4
    assert found.at({"B": 1, "T": 5000}) < 5000 * 8 * 4 * 3


def test_operators_for_attention_are_counted_with_their_scores() -> None:
    text = '<ir_version: 11, opset_import: ["": 23]> g (float[B, T, 8] x) => (float[B, T, 8] y)'
    body = "{ y = Attention<q_num_heads=4, kv_num_heads=4>(x, x, x) }"
    found = Footprint(parser.parse_model(f"{text} {body}")).at({"B": 2, "T": 3000})
    assert found >= 2 * 4 * 3000**2 * 4


def test_an_operator_that_nobody_knows_makes_what_it_is_given() -> None:
    text = '<ir_version: 9, opset_import: ["": 20, "own": 1]> g (float[B, T, 8] x) => (float[] y)'
    found = Footprint(parser.parse_model(f"{text} {{ a = own.Odd(x) y = ReduceSum(a) }}"))
    assert found.at({"B": 2, "T": 100}) == 2 * 100 * 8 * 4 + 4


KERNELS = {
    'LinearAttention<q_num_heads=4, kv_num_heads=2, update_rule="linear">(x, x, x, past)': (16, 1),
    'CausalConvWithState(x, w, "", past)': (8, 1),
    'GatedDeltaNet(x, x, x, "", x, x, past)': (8, 1),
}
"""Calls of ONNX Runtime's operators: elements of their output for a token, and states they make."""


@pytest.mark.parametrize("call", KERNELS)
def test_operators_of_onnx_runtime_make_values_and_not_states(call: str) -> None:
    """A large state is not what a short call's output is like."""
    width, states = KERNELS[call]
    call = call.replace('""', "nothing")
    text = (
        '<ir_version: 9, opset_import: ["": 20, "com.microsoft": 1]>'
        "g (float[B, T, 8] x, float[8, 1, 4] w, float[B, 2, 64, 64] past)"
        "=> (float[] y, float[B, 2, 64, 64] next)"
        f"{{ a, next = com.microsoft.{call} y = ReduceSum(a) }}"
    )
    model = parser.parse_model(text)
    for node in model.graph.node:
        for place, name in enumerate(node.input):
            if name == "nothing":
                node.input[place] = ""
    found = Footprint(model).at({"B": 2, "T": 3})
    assert found == 2 * 3 * width * 4 + states * 2 * 2 * 64 * 64 * 4 + 4


def test_rows_of_a_quantised_table_are_counted_by_the_tokens() -> None:
    text = (
        '<ir_version: 9, opset_import: ["": 20, "com.microsoft": 1]>'
        "g (uint8[1000, 32] table, int64[B, T] ids, float[1000, 2] scales) => (float[] y)"
        "{ a = com.microsoft.GatherBlockQuantized<block_size=32>(table, ids, scales)"
        " y = ReduceSum(a) }"
    )
    found = Footprint(parser.parse_model(text))
    assert found.at({"B": 2, "T": 5}) == 2 * 5 * 64 * 4 + 4


def test_a_transposed_weight_is_no_memory_of_a_call() -> None:
    text = (
        '<ir_version: 9, opset_import: ["": 20]> g (float[B, T, 8] x) => (float[] y)'
        "{ t = Transpose<perm=[1, 0]>(w) a = MatMul(x, t) y = ReduceSum(a) }"
    )
    model = parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((5000, 8), np.float32), "w"))
    assert Footprint(model).at({"B": 1, "T": 1}) == 5000 * 4 + 4
