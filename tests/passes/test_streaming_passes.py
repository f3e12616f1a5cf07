"""Positions and causal convolutions get states; what mixes tokens is found, and nothing else is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper, parser

from linexport import passes
from linexport.graph import external_data, states
from linexport.plugins.ops.registry import attach_functions, register_schemas
from linexport.sources import load_model
from linexport.token_flow import classify
from linexport.trace import trace

ATTENTION = """z = linexport.LinearAttention <q_num_heads = 2, kv_num_heads = 2> (q, q, q)"""
RANDOM = np.random.default_rng(0)


Build = Callable[..., onnx.ModelProto]


@pytest.fixture
def graph(tmp_path: Path) -> Build:
    """``graph(body, weights)``: x (batch, seq, 8) -> ``body``, which makes q of x -> attention."""

    def build(
        body: str, weights: dict[str, np.ndarray] | None = None, attention: str = ATTENTION
    ) -> onnx.ModelProto:
        register_schemas()
        model = parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 18, "linexport" : 1]>'
            "g (float[batch, seq, 8] x) => (float[batch, seq, 8] z) {"
            "one = Constant <value = int64 {1}> ()  zero = Constant <value = int64 {0}> ()"
            f"shape = Shape(x)  n = Gather(shape, one)  {body}  {attention} }}"
        )
        for i, node in enumerate(model.graph.node):
            node.name = f"n{i}"
        for name, value in (weights or {}).items():
            model.graph.initializer.append(numpy_helper.from_array(value, name))
        for name, shape in (("q", ["batch", "seq", 8]), ("begun", ["batch", 2, 4, 4])):
            model.graph.value_info.append(helper.make_tensor_value_info(name, 1, shape))
        attach_functions(model)
        path = tmp_path / "m.onnx"
        path.write_bytes(model.SerializeToString())
        return trace(load_model(path)).model

    return build


def mixing(model: onnx.ModelProto) -> list[str]:
    """What mixes tokens in a model after the passes."""
    found = classify(model, states.find_states(model)).mixing
    return [f"{one.op} {one.reason}" for one in found]


def ops(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def streamed(model: onnx.ModelProto, x: np.ndarray, pieces: list[int]) -> np.ndarray:
    """The rewritten model's output, piece by piece."""
    attach_functions(model)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    state = {
        i.name: np.zeros(
            [d if isinstance(d, int) else 0 if d == "past" else len(x) for d in i.shape],
            np.int64 if "int64" in i.type else np.float32,
        )
        for i in session.get_inputs()[1:]
    }
    names, parts, start = [o.name for o in session.get_outputs()], [], 0
    for size in pieces:
        got = dict(
            zip(names, session.run(None, {"x": x[:, start : start + size], **state}), strict=True)
        )
        state = {past: got[past.replace("past", "present")] for past in state}
        parts.append(got["z"])
        start += size
    return np.concatenate(parts, axis=1)


def whole(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """The output of the model as it was."""
    plain = onnx.ModelProto.FromString(model.SerializeToString())
    attach_functions(plain)
    return onnxruntime.InferenceSession(plain.SerializeToString()).run(None, {"x": x})[0]


TABLE = {"table": RANDOM.normal(size=(64, 8)).astype(np.float32)}
WIDE = {"wide": RANDOM.normal(size=(1, 64, 8)).astype(np.float32)}
KERNEL = {"w": RANDOM.normal(size=(8, 1, 4)).astype(np.float32), "b": np.ones(8, np.float32)}
FULL = {"full": RANDOM.normal(size=(8, 8, 4)).astype(np.float32) / 6}
RANGE = "r = Range(zero, n, one)"
LOOKED_UP = "  e = Gather(table, r)  q = Add(x, e)"
ENDS = "lo = Constant <value = int64[1] {0}> ()  hi = Unsqueeze(n, lo)"
CONV = "c = Transpose <perm = [0, 2, 1]> (x) %s q = Transpose <perm = [0, 2, 1]> (y)"

DISTANCES = (
    f"{RANGE} a1 = Constant <value = int64[1] {{1}}> ()  rows = Unsqueeze(r, a1)  d = Sub(rows, r)"
    "low = Constant <value = float {-1e9}> ()  three = Constant <value = int64 {3}> ()"
)
SEEN = "seen = GreaterOrEqual(d, zero)"
LATE = "early = Greater(d, three)  late = Not(early)  own = GreaterOrEqual(d, zero)"
SCORES = "k = Transpose <perm = [0, 2, 1]> (x)  s = MatMul(x, k)"
ATTENDED = f"{SCORES}  f = Where(seen, s, low)  p = Softmax(f)  q = MatMul(p, x)"

STREAMS = {
    "convolution of all channels": (
        CONV % "y = Conv <pads = [3, 0]> (c, full)",
        FULL,
        "Conv",
    ),
    "convolution of groups of channels": (
        CONV % "y = Conv <group = 2, pads = [3, 0]> (c, half, b)",
        {"half": FULL["full"][:, :4], "b": np.ones(8, np.float32)},
        "Conv",
    ),
    "convolution with gaps": (
        CONV % "y = Conv <group = 8, pads = [6, 0], dilations = [2]> (c, w)",
        KERNEL,
        "Conv",
    ),
    "convolution with gaps, padded before": (
        CONV % "p = Constant <value = int64[6] {0, 0, 9, 0, 0, 0}> ()  d = Pad(c, p)"
        "y = Conv <dilations = [3]> (d, full)",
        FULL,
        "Conv",
    ),
    "softmax of all tokens before": (f"{DISTANCES} {SEEN} {ATTENDED}", {}, "Softmax"),
    "softmax of a window": (
        f"{DISTANCES} {LATE} seen = And(own, late) {ATTENDED}",
        {},
        "WindowAttention",
    ),
    "softmax with a mask that is added": (
        f"{DISTANCES} {LATE} seen = And(own, late)  f0 = Constant <value = float {{0}}> ()"
        f"m = Where(seen, f0, low) {SCORES} half = Constant <value = float {{0.5}}> ()"
        "f = Add(s, m)  g = Mul(f, half)  p = Softmax(g)  q = MatMul(p, x)",
        {},
        "WindowAttention",
    ),
    "softmax by einsum, its mask in two parts": (
        f"{DISTANCES} {SEEN} far = Greater(d, three)"
        's = Einsum <equation = "btd,bsd->bts"> (x, x)  f = Where(far, low, s)'
        'g = Where(seen, f, low)  p = Softmax(g)  q = Einsum <equation = "bts,bsd->btd"> (p, x)',
        {},
        "WindowAttention",
    ),
    "a table looked up": (RANGE + LOOKED_UP, TABLE, "Gather"),
    "positions from one": ("m = Add(n, one)  r = Range(one, m, one)" + LOOKED_UP, TABLE, "Gather"),
    "a table cut": (
        f"{ENDS} axis = Constant <value = int64[1] {{1}}> ()"
        "e = Slice(wide, lo, hi, axis)  q = Add(x, e)",
        WIDE,
        "Gather",
    ),
    "float positions": (
        f"{RANGE} f = Cast <to = 1> (r)  two = Constant <value = int64[1] {{1}}> ()"
        "u = Unsqueeze(f, two)  s = Sin(u)  q = Mul(x, s)",
        {},
        "Add",
    ),
    "a convolution padded before": (
        CONV % "p = Constant <value = int64[6] {0, 0, 3, 0, 0, 0}> ()  d = Pad(c, p)"
        "y = Conv <group = 8> (d, w, b)",
        KERNEL,
        "CausalConvWithState",
    ),
    "a convolution behind zeros": (
        CONV % "b0 = Shape <start = 0, end = 1> (x)"
        "s = Constant <value = int64[2] {8, 3}> ()  s3 = Concat <axis = 0> (b0, s)"
        "zeros = ConstantOfShape (s3)  d = Concat <axis = -1> (zeros, c)"
        "y = Conv <group = 8> (d, w, b)",
        KERNEL,
        "CausalConvWithState",
    ),
    "a loop": (
        "b0 = Shape <start = 0, end = 1> (x)  eight = Constant <value = int64[1] {8}> ()"
        "s = Concat <axis = 0> (b0, eight)  h0 = ConstantOfShape (s)"
        "last, y = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1],"
        "body = step (float[batch, 8] h, float[batch, 8] t)"
        "=> (float[batch, 8] next, float[batch, 8] out)"
        "{ sum = Add(h, t)  next = Tanh(sum)  out = Identity(next) }> (h0, x)  q = Add(x, y)",
        {},
        "Scan",
    ),
    "a convolution that pads one side": (
        CONV % "y = Conv <group = 8, pads = [3, 0]> (c, w)",
        KERNEL,
        "CausalConvWithState",
    ),
    "a convolution that pads both and loses its end": (
        CONV
        % "begin = Constant <value = int64[1] {0}> ()  two = Constant <value = int64[1] {2}> ()"
        "end = Constant <value = int64[1] {-3}> ()"
        "d = Conv <group = 8, pads = [3, 3]> (c, w, b)  y = Slice(d, begin, end, two)",
        KERNEL,
        "CausalConvWithState",
    ),
    "a convolution that pads both and is cut": (
        CONV % f"{ENDS} axis = Constant <value = int64[1] {{2}}> ()"
        "d = Conv <group = 8, pads = [3, 3]> (c, w, b)  y = Slice(d, lo, hi, axis)",
        KERNEL,
        "CausalConvWithState",
    ),
}


@pytest.mark.parametrize("case", STREAMS, ids=str)
def test_pieces_give_what_the_whole_gives(graph: Build, case: str) -> None:
    body, weights, op = STREAMS[case]
    model = graph(body, weights)
    rewritten = passes.run(model)
    assert ops(rewritten)[op] >= 1
    x = RANDOM.normal(size=(3, 40, 8)).astype(np.float32)
    expected = whole(model, x)
    for pieces in ([40], [1, 1, 7, 31], [39, 1]):
        found = streamed(passes.run(model), x, pieces)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert mixing(rewritten) == []


@pytest.mark.parametrize("case", STREAMS, ids=str)
def test_without_states_the_graph_is_as_it_was(graph: Build, case: str) -> None:
    body, weights, op = STREAMS[case]
    model = graph(body, weights)
    found = ops(passes.run(model, passes.STATELESS))
    if op == "WindowAttention":  # computes in blocks with or without a state
        assert found[op] == 1
    else:
        assert found == ops(passes.run(model, passes.STATELESS[:1]))


@pytest.mark.parametrize(
    ("body", "weights"),
    [
        # Positions that pick tokens of the piece itself.
        (f"{RANGE} q = Gather <axis = 1> (x, r)", {}),
        # Not the positions of all tokens.
        (
            "r = Range(one, n, one)  s = ReduceSum <keepdims = 0> (r)"
            "f = Cast <to = 1> (s)  q = Add(x, f)",
            {},
        ),
        # Convolutions that see what comes later, or are padded for another dilation.
        (CONV % "y = Conv <group = 8, pads = [1, 2]> (c, w)", KERNEL),
        (CONV % "y = Conv <group = 8, pads = [0, 3]> (c, w)", KERNEL),
        (
            CONV % "y = Conv <group = 8, pads = [3, 3], dilations = [2]> (c, w)",
            KERNEL,
        ),
        (
            CONV % "p = Constant <value = int64[6] {0, 0, 3, 0, 0, 0}> ()"
            "v = Constant <value = float {1}> ()  d = Pad(c, p, v)  y = Conv <group = 8> (d, w)",
            KERNEL,
        ),
    ],
)
def test_what_is_something_else_is_left_alone(
    graph: Build, body: str, weights: dict[str, np.ndarray]
) -> None:
    rewritten = passes.run(graph(body, weights))
    assert "CausalConvWithState" not in ops(rewritten)
    assert "past_length" not in [i.name for i in rewritten.graph.input]


@pytest.mark.parametrize(
    "body",
    [
        # The token itself is not seen, or one after it is.
        f"{DISTANCES} seen = Greater(d, zero) {ATTENDED}",
        f"{DISTANCES} m1 = Constant <value = int64 {{-1}}> ()  seen = GreaterOrEqual(d, m1)"
        f"{ATTENDED}",
        # Every token but the last three, and every second one.
        f"{DISTANCES} seen = Greater(d, three) {ATTENDED}",
        f"{DISTANCES} two = Constant <value = int64 {{2}}> ()  odd = Mod(d, two)"
        f"even = Equal(odd, zero)  own = GreaterOrEqual(d, zero)  seen = And(own, even) {ATTENDED}",
        # The first tokens are always seen.
        f"{DISTANCES} {LATE} first = Less(r, three)  recent = Or(late, first)"
        f"seen = And(own, recent) {ATTENDED}",
        # A number of each distance is added.
        f"{DISTANCES} {SEEN} {SCORES} b = Cast <to = 1> (d)  t = Sub(s, b)"
        "f = Where(seen, t, low)  p = Softmax(f)  q = MatMul(p, x)",
        # Masked scores are capped.
        f"{DISTANCES} {SEEN} {SCORES} f = Where(seen, s, low)  g = Tanh(f)"
        "p = Softmax(g)  q = MatMul(p, x)",
        # The scores turn into something else before they are masked, or the weights do.
        f"{DISTANCES} {SEEN} {SCORES} t = Softmax(s)  f = Where(seen, t, low)  p = Softmax(f)"
        "q = MatMul(p, x)",
        f"{DISTANCES} {SEEN} {SCORES} f = Where(seen, s, low)  p = Softmax(f)  w = Mul(p, p)"
        "q = MatMul(w, x)",
        # The sum is over queries.
        f"{DISTANCES} {SEEN} {SCORES} f = Where(seen, s, low)  p = Softmax <axis = 1> (f)"
        "q = MatMul(p, x)",
    ],
)
def test_softmax_of_something_else_is_left_alone(graph: Build, body: str) -> None:
    rewritten = passes.run(graph(body))
    assert "past_mask" not in [i.name for i in rewritten.graph.input]
    assert mixing(rewritten)


def test_a_caller_that_counts_tokens_keeps_its_input(graph: Build) -> None:
    model = graph(f"{RANGE} e = Gather(table, r)  q = Add(x, e)", TABLE)
    model.graph.input.append(helper.make_tensor_value_info("past_length", 1, [1]))
    model.graph.node.append(helper.make_node("Identity", ["past_length"], ["unused"]))
    assert [i.name for i in passes.run(model).graph.input].count("past_length") == 1


def test_no_positions_are_counted_where_nothing_is_causal(graph: Build) -> None:
    both = ATTENTION.replace("<", "<causal = 0, ")
    model = graph(f"{RANGE} e = Gather(table, r)  q = Add(x, e)", TABLE, both)
    assert [i.name for i in passes.run(model).graph.input] == ["x"]


def test_twice_is_once(graph: Build) -> None:
    model = graph(*STREAMS["a table cut"][:2])
    once = passes.run(model)
    again = passes.run(once)
    assert ops(again) == ops(once)


@pytest.mark.parametrize(("fill", "exposed"), [(0.0, True), (1.0, False)])
def test_a_past_of_zeros_is_none(fill: float, exposed: bool) -> None:
    """It is what the op begins with; a model that begins with another one keeps it."""
    register_schemas()
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18, "linexport" : 1]>'
        "g (float[batch, seq, 8] x) => (float[batch, seq, 8] y) {"
        "shape = Shape <start = 0, end = 1> (x)  sizes = Constant <value = int64[3] {2, 4, 4}> ()"
        "all = Concat <axis = 0> (shape, sizes)"
        f"begin = ConstantOfShape <value = float[1] {{{fill}}}> (all)"
        "y = linexport.LinearAttention <q_num_heads = 2, kv_num_heads = 2> (x, x, x, begin) }"
    )
    known = helper.make_tensor_value_info("begin", 1, ["batch", 2, 4, 4])
    model.graph.value_info.append(known)
    attach_functions(model)
    found = passes.run(model)
    assert (len(found.graph.input) == 2) == exposed


MIXES = {
    "ReduceMean": "axes = Constant <value = int64[1] {1}> () a = ReduceMean(x, axes) q = Sub(x, a)",
    "Softmax": "q = Softmax <axis = 1> (x)",
    "CumSum": "q = CumSum <reverse = 1> (x, one)",
    "MatMul": "t = Transpose <perm = [0, 2, 1]> (x) s = MatMul(x, t) q = MatMul(s, x)",
    "LayerNormalization": "q = LayerNormalization <axis = 1> (x, unit)",
    "Conv": CONV % "y = Conv <group = 8, pads = [1, 2]> (c, w)",
    "InstanceNormalization": CONV % "y = InstanceNormalization(c, b, b)",
    "Slice of two copies": "a = Concat <axis = 1> (x, x)  hi = Constant <value = int64[1] {9}> ()"
    "lo = Constant <value = int64[1] {0}> () o = Constant <value = int64[1] {1}> ()"
    "s = Slice(a, lo, hi, o) m = ReduceMean(s, o) q = Add(x, m)",
    "Slice": "q = Slice(x, last, before, axis, last)",
    "Pad": "q = Pad(x, shifted)",
    "Slice of an unknown part": "length = Shape <start = 1, end = 2> (x) half = Div(length, two)"
    "late = Slice(x, half, length, axis)  early = Slice(x, nothing, half, axis)"
    "q = Concat <axis = 1> (late, early)",
}
PLACES = {
    "last": [-1],
    "before": [-(1 << 40)],
    "axis": [1],
    "two": [2],
    "nothing": [0],
    "four": [4],
    "shifted": [0, -1, 0, 0, 1, 0],
    "channels": [0, 0, -1, 0, 0, 1],
}
PLACES = {name: np.array(value) for name, value in PLACES.items()}


@pytest.mark.parametrize("op", MIXES)
def test_what_mixes_tokens_is_named(graph: Build, op: str) -> None:
    model = graph(MIXES[op], {**KERNEL, **PLACES, "unit": np.ones(1, np.float32)})
    found = mixing(passes.run(model))
    # The mean that is taken off what an InstanceNormalization reads is named before it.
    assert any(reason.startswith(op.partition(" ")[0]) for reason in found), found


PER_TOKEN = [
    "q = Softmax(x)",
    "a = Constant <value = int64[1] {-1}> () m = ReduceMean(x, a) q = Sub(x, m)",
    "w = Constant <value = float[8] {1,1,1,1,1,1,1,1}> () q = LayerNormalization (x, w)",
    "q = MatMul(x, square)",
    "s = Constant <value = int64[4] {0, 0, 2, 4}> () a = Reshape(x, s)"
    "b = Transpose <perm = [0, 2, 1, 3]> (a) c = Transpose <perm = [0, 2, 1, 3]> (b)"
    "t = Constant <value = int64[3] {0, 0, 8}> () q = Reshape(c, t)",
    "q = Relu(x)",
    "q = Pad(x, channels)",
    "a = Slice(x, nothing, four, last)  q = Concat <axis = -1> (a, a)",
    CONV % "y = Conv <kernel_shape = [1], group = 8> (c, unit)",
]


@pytest.mark.parametrize("body", PER_TOKEN)
def test_what_acts_per_token_is_not(graph: Build, body: str) -> None:
    weights = {"square": np.ones((8, 8), np.float32), "unit": np.ones((8, 1, 1), np.float32)}
    model = graph(body, {**weights, **PLACES})
    model = passes.run(model)
    external_data.externalize(model, 200)  # weights of a real model are not in it
    assert mixing(model) == []


def test_attention_that_sees_all_tokens_mixes_them(graph: Build) -> None:
    both = "q = linexport.LinearAttention <q_num_heads = 2, kv_num_heads = 2, causal = 0> (x, x, x)"
    assert mixing(passes.run(graph(both)))[0].startswith("LinearAttention")


STABILIZED = "q, k = linexport.StabilizedExp <q_num_heads = 2, k_num_heads = 2, causal = %d> (x, x)"


def test_exponents_whose_maximum_is_a_state_do_not_mix_tokens(graph: Build) -> None:
    assert mixing(passes.run(graph(STABILIZED % 1))) == []
    assert mixing(passes.run(graph(STABILIZED % 0)))[0].startswith("StabilizedExp")


def test_an_op_along_another_axis_than_its_own_mixes_tokens() -> None:
    """Experts that take tokens for channels."""
    register_schemas()
    swapped = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18, "linexport" : 1]>'
        "g (float[batch, seq, 8] x, float[8, 1, 4] w, float[1, seq] y, int64[1, 1] i,"
        "   float[1, 1] r, float[2, 6, seq] up, float[2, 8, 3] down)"
        " => (float[batch, 8, seq] c, float[1, 8] z) {"
        "a = Transpose <perm = [0, 2, 1]> (x)"
        "c, n = linexport.CausalConvWithState (a, w)"
        "z = linexport.MixtureOfExperts (y, i, r, up, down) }"
    )
    found = mixing(passes.run(onnx.shape_inference.infer_shapes(swapped)))
    assert [name.split()[0] for name in found] == ["MixtureOfExperts"]


ZEROS = {
    "zeros": "begun = ConstantOfShape(sizes)",
    "zeros times a number": "a = ConstantOfShape(sizes)  h = Constant <value = float {0.5}> ()"
    "  begun = Mul(a, h)",
    "half of zeros times a matrix": "a = ConstantOfShape(sizes)  m = MatMul(eye, a)"
    "  h = Constant <value = float {0.5}> ()  begun = Mul(m, h)",
    "a matrix times zeros": "a = ConstantOfShape(sizes)  begun = MatMul(eye, a)",
    "a sum of zeros": "three = Constant <value = int64[1] {3}> ()"
    "  more = Concat <axis = 0> (three, sizes)  a = ConstantOfShape(more)"
    "  first = Constant <value = int64[1] {0}> ()  begun = ReduceSum <keepdims = 0> (a, first)",
    "zeros that are doubled and reshaped": "flat = ReduceProd <keepdims = 1> (sizes)"
    "  a = ConstantOfShape(flat)  h = Constant <value = float {2}> ()  d = Mul(a, h)"
    "  begun = Reshape(d, sizes)",
}


@pytest.mark.parametrize("start", ZEROS)
def test_a_state_begins_with_zeros_however_they_are_made(graph: Build, start: str) -> None:
    attention = (
        "b = Slice(shape, zero1, one1)  rest = Constant <value = int64[3] {2, 4, 4}> ()"
        "  sizes = Concat <axis = 0> (b, rest)"
        f"  {ZEROS[start]}  z = linexport.LinearAttention <q_num_heads = 2, kv_num_heads = 2>"
        "(q, q, q, begun)"
    )
    places = (
        "zero1 = Constant <value = int64[1] {0}> ()  one1 = Constant <value = int64[1] {1}> ()"
        "  q = Identity(x)"
    )
    model = graph(places, {"eye": np.eye(4, dtype=np.float32)}, attention)
    rewritten = passes.rewrite(model).model
    assert [s.op for s in states.find_states(rewritten)] == ["LinearAttention"]
    assert not mixing(rewritten)
    x = RANDOM.normal(size=(2, 9, 8)).astype(np.float32)
    expected = whole(model, x)
    np.testing.assert_allclose(streamed(rewritten, x, [9]), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(streamed(rewritten, x, [4, 1, 4]), expected, rtol=1e-5, atol=1e-6)


COME = (
    "{x}  axis = Constant <value = int64[1] {{1}}> ()  total = ReduceSum <keepdims = 1> (u, axis)"
    "  so_far = CumSum(u, one)  c = Sub(total, so_far)"
)
"""What is to come of u after each token."""


@pytest.mark.parametrize("kind", ["int64", "float"])
def test_integers_to_come_are_summed_from_the_end(graph: Build, kind: str) -> None:
    """Of floats, the difference is what the model computes, to its digits."""
    counted = "t = Constant <value = float {8}> ()  m = Mul(x, t)  r = Round(m)"
    own = "u = Cast <to = 7> (r)" if kind == "int64" else "u = Identity(r)"
    body = COME.format(x=f"{counted}  {own}") + "  q = Cast <to = 1> (c)"
    model = graph(body)
    rewritten = passes.rewrite(model).model
    sums = [node for node in rewritten.graph.node if node.op_type == "CumSum"]
    assert any(a.name == "reverse" for node in sums for a in node.attribute) == (kind == "int64")
    x = RANDOM.normal(size=(2, 9, 8)).astype(np.float32)
    np.testing.assert_allclose(streamed(rewritten, x, [9]), whole(model, x), rtol=1e-5, atol=1e-5)


def test_a_sum_of_a_type_that_numpy_lacks_is_left_alone() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]>'
        "g (bfloat16[b, s, 8] x) => (bfloat16[b, s, 8] z) {"
        "axes = Constant <value = int64[1] {1}> ()  axis = Constant <value = int64 {1}> ()"
        "total = ReduceSum (x, axes)  so_far = CumSum(x, axis)  z = Sub(total, so_far) }"
    )
    rewritten = passes.rewrite(model).model
    assert ops(rewritten)["Sub"] == 1
