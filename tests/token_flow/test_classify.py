"""Nodes are classified by what they do along the tokens, each kind with its number."""

from __future__ import annotations

import onnx
import pytest
from onnx import helper, parser

from linexport.graph.states import State
from linexport.plugins.ops.registry import register_schemas
from linexport.token_flow import Classification, FlowKind, classify
from linexport.token_flow.masks import LinearStep, Mask, combined, constant, linear

HELD = State("past_state_0", "present_state_0", "float32", ("batch", 1, 4, 4), "LinearAttention")
LENGTH = State("past_length", "present_length", "int64", (1,), "Positions")

NUMBERS = "".join(
    f"{name} = Constant <value = int64[1] {{{value}}}> ()"
    for name, value in (
        *(("zero", 0), ("one", 1), ("two", 2), ("seven", 7), ("batch_axis", 0), ("last", -1)),
        ("end", 1 << 40),
    )
)


def rows(count: int | str, number: int = 0, shape: str = "{0}, 4") -> State:
    sizes = tuple(int(s) if s.isdigit() else s for s in shape.format(count).split(", "))
    name = f"inputs_{number}"
    return State(f"past_{name}", f"present_{name}", "float32", ("batch", *sizes), "Conv")


def graph(body: str, *states: State, tokens: str = "seq") -> onnx.ModelProto:
    """x (batch, tokens, 4) -> ``body``, which makes q -> linear attention with a state."""
    register_schemas()
    held = [HELD, *states]
    kinds = {"float32": "float", "int64": "int64"}

    def listed(side: str) -> str:
        return "".join(
            f", {kinds[s.dtype]}[{', '.join(map(str, s.shape))}] {getattr(s, side)}" for s in held
        )

    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 20, "linexport" : 1]>'
        f"g (float[batch, seq, 4] x{listed('past')})"
        f" => (float[batch, seq, 4] z{listed('present')}) {{"
        f"{NUMBERS} {body}"
        "z, present_state_0 = linexport.LinearAttention <q_num_heads = 1, kv_num_heads = 1>"
        " (q, q, q, past_state_0) }"
    )
    for number, node in enumerate(model.graph.node):
        node.name = f"n{number}"
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.shape.dim[1].dim_param = tokens
    model.graph.value_info.append(helper.make_tensor_value_info("q", 1, ["batch", tokens, 4]))
    return model


def classified(body: str, *states: State, tokens: str = "seq", multiple: int = 1) -> Classification:
    model = graph(body, *states, tokens=tokens)
    return classify(model, [HELD, *states], None, multiple)


SEEN = "seen = Concat <axis = 1> (past_inputs_0, x)  minus = Neg(seven)"
KEPT = "present_inputs_0 = Slice(seen, minus, end, one)"
COUNT = "count = Shape <start = 1, end = 2> (x)"
EDGE = "n0 = Squeeze(zero)  n1 = Squeeze(one)  length = Squeeze(count)"


def test_each_kind_is_counted() -> None:
    found = classified(
        f"{SEEN} {KEPT} {COUNT} {EDGE} late = Slice(seen, zero, count, one)"
        "i = Range(n0, length, n1)  place = Add(i, past_length)  f = Cast <to = 1> (place)"
        "w = Sin(f)  p = Unsqueeze(w, one)  a = Sub(x, late)  q = Add(a, p)"
        "present_length = Add(past_length, count)",
        rows(7),
        LENGTH,
    )
    assert not found.mixing
    counts = {kind.value: number for kind, number in found.counts.items()}
    # Concat and LinearAttention; Add of past_length; Sub; Slices and Add.
    assert counts == {"tokenwise": 3, "stateful": 2, "offset": 1, "window": 1, "mixing": 0}
    (window,) = [one for one in found.placed if one.kind == FlowKind.WINDOW]
    assert (window.op, window.reach, window.rows) == ("Sub", 7, 7)
    assert 7 in found.reaches


@pytest.mark.parametrize(
    ("body", "op", "reason"),
    [
        # Fewer rows than it looks back by.
        (
            f"{SEEN} {KEPT} i8 = Constant <value = int64[1] {{8}}> ()  {COUNT} {EDGE}"
            "i = Range(n0, length, n1)  m = Sub(i, n1)  s = Squeeze(seven)"
            "g = Gather <axis = 1> (seen, m)  q = Sub(x, g)",
            "Gather",
            "looks back 8 tokens",
        ),
        # Other rows are kept than are read.
        (
            f"{SEEN} m1 = Neg(one)  late = Neg(seven)  l8 = Sub(late, one)"
            "present_inputs_0 = Slice(seen, l8, m1, one)"
            f"  {COUNT} q = Slice(seen, zero, count, one)",
            "Concat",
            "gives other rows to the next call",
        ),
        # Rows of a value are kept for those of another.
        (
            f"{SEEN} other = Relu(seen)  present_inputs_0 = Slice(other, minus, end, one)"
            f"{COUNT} q = Slice(seen, zero, count, one)",
            "Concat",
            "gives other rows to the next call",
        ),
        (f"{SEEN} {KEPT} q = Slice(seen, seven, end, one)", "", ""),
    ],
)
def test_rows_of_a_state_are_those_that_are_read(body: str, op: str, reason: str) -> None:
    found = classified(body, rows(7)).mixing
    assert [one.op for one in found] == [op] * bool(op)
    assert all(reason in one.reason for one in found)


MIXING = {
    "zeros in front": (
        "p = Constant <value = int64[6] {0, 2, 0, 0, 0, 0}> ()  w = Pad(x, p)"
        f"{COUNT} q = Slice(w, zero, count, one)",
        "Pad",
    ),
    "a mean": ("m = ReduceMean(x, one)  q = Sub(x, m)", "ReduceMean"),
    "the last token": ("e = Slice(x, last, end, one)  q = Add(x, e)", "Add"),
    "the first token of a call": ("b = Slice(x, zero, one, one)  q = Add(x, b)", "Add"),
    "positions of a call": (
        f"{COUNT} {EDGE} i = Range(n0, length, n1)  f = Cast <to = 1> (i)  w = Cos(f)"
        "p = Unsqueeze(w, one)  q = Add(x, p)",
        "Cos",
    ),
    "the length": (
        f"{COUNT} f = Cast <to = 1> (count)  q = Div(x, f)",
        "Div",
    ),
    "tokens for channels": (
        "t = Transpose <perm = [0, 2, 1]> (x)  s = Softmax(t)q = Transpose <perm = [0, 2, 1]> (s)",
        "Softmax",
    ),
    "an unknown operator": ("q = other.Unknown(x)", "Unknown"),
    "a recurrence backwards": (
        "m1 = Neg(one)  least = Neg(end)  q = Slice(x, m1, least, one, m1)",
        "Slice",
    ),
    "all pairs": (
        "t = Transpose <perm = [0, 2, 1]> (x)  s = MatMul(x, t)  q = MatMul(s, x)",
        "MatMul",
    ),
    "a choice by the length": (
        f"{COUNT} {EDGE} long = Greater(length, n1)"
        "q = If (long) <then_branch = a () => (float[batch, seq, 4] y) { y = Relu(x) },"
        " else_branch = b () => (float[batch, seq, 4] w) { w = Neg(x) }>",
        "Greater",
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_tokens_is_named(name: str) -> None:
    body, op = MIXING[name]
    model = graph(body)
    if "other." in body:
        model.opset_import.append(helper.make_opsetid("other", 1))
    found = classify(model, [HELD]).mixing
    assert [one.op for one in found] == [op] and found[0].reason


STREAMING = {
    "rows of tokens": "s = Shape(x)  w = Constant <value = int64[2] {-1, 4}> ()"
    "f = Reshape(x, w)  r = Relu(f)  q = Reshape(r, s)",
    "padding that is cut off again": "p = Constant <value = int64[6] {0, 0, 0, 0, 3, 0}> ()"
    f"w = Pad(x, p)  {COUNT} q = Slice(w, zero, count, one)",
    "a body for each channel": "t = Transpose <perm = [2, 0, 1]> (x)"
    "h = Constant <value = float {0}> ()"
    "s = Scan <num_scan_inputs = 1, body = b (float[batch, seq] y)"
    " => (float[batch, seq] o) { o = Relu(y) }> (t)  q = Transpose <perm = [1, 2, 0]> (s)",
    "a choice by a weight": "c = Constant <value = float {1}> ()  yes = Greater(c, c)"
    "q = If (yes) <then_branch = a () => (float[batch, seq, 4] y) { y = Relu(x) },"
    " else_branch = b () => (float[batch, seq, 4] w) { w = Neg(x) }>",
    "distances of positions": f"{COUNT} {EDGE} i = Range(n0, length, n1)"
    "r = Unsqueeze(i, one)  d = Sub(r, i)  own = Equal(d, zero)  m = Cast <to = 1> (own)"
    "q = MatMul(m, x)",
}


@pytest.mark.parametrize("name", STREAMING)
def test_what_does_not_mix_tokens_is_not_named(name: str) -> None:
    assert classified(STREAMING[name]).mixing == ()


@pytest.mark.parametrize(("held", "op"), [("past_inputs_0", "Add"), ("given", "")])
def test_a_number_of_all_tokens_does_not_meet_a_state_from_before(held: str, op: str) -> None:
    """What a call is given is the same in all of them; a state before the last is of a cut."""
    length = State("past_length", "present_length", "int64", (1,), "Positions")
    model = graph(
        f"q = Identity(x)  {SEEN} {KEPT} {COUNT}"
        "present_length = Add(past_length, count)  total = Cast <to = 1> (present_length)"
        f"first = Add({held}, total)",
        rows(7),
        length,
    )
    sizes = ["batch", 7, 4] if op else [1]
    model.graph.input.append(helper.make_tensor_value_info("given", 1, [1]))
    model.graph.output.append(helper.make_tensor_value_info("first", 1, sizes))
    found = classify(model, [HELD, rows(7), length]).mixing
    assert [one.op for one in found] == [op] * bool(op)


COUNTED = State("past_count", "present_count", "float32", ("batch", 1), "TokenCount")


@pytest.mark.parametrize(("summed", "op"), [("m", ""), ("n", "CumSum")])
def test_a_running_sum_streams_where_a_state_is_the_sum_before(summed: str, op: str) -> None:
    found = classified(
        "c = Slice(x, zero, one, two)  m = Squeeze(c, two)  n = Neg(m)  sums = CumSum(m, one)"
        "k = Constant <value = float {1}> ()  less = Sub(sums, k)  place = Add(less, past_count)"
        "w = Cos(place)  p = Unsqueeze(w, two)  q = Add(x, p)"
        f"all = ReduceSum({summed}, one)  present_count = Add(past_count, all)",
        COUNTED,
    ).mixing
    assert [one.op for one in found] == [op] * bool(op)


SINK = (
    f"{SEEN} {KEPT} {COUNT} {EDGE} all = Shape <start = 1, end = 2> (seen)  total = Squeeze(all)"
    "columns = Range(n0, total, n1)  behind = Neg(count)  rows = Slice(columns, behind, end, zero)"
    "r = Unsqueeze(rows, one)  d = Sub(r, columns)  near = LessOrEqual(d, seven)"
    "past = GreaterOrEqual(d, zero)  mask = And(near, past)"
    "t = Transpose <perm = [0, 2, 1]> (seen)  s = MatMul(x, t)"
    "low = Constant <value = float {-1e9}> ()  f = Where(mask, s, low)"
    "own = Slice(x, zero, one, two)  both = Concat <axis = -1> (f, own)"
    "p = Softmax(both)  w = Slice(p, zero, %s, two)  q = MatMul(w, seen)"
)


def test_a_score_that_is_no_tokens_is_cut_off_again() -> None:
    assert classified(SINK % "last", rows(7)).mixing == ()


CHUNKS = "c = Constant <value = int64[4] {0, -1, 8, 4}> ()  s = Shape(x)  r = Reshape(x, c)"


@pytest.mark.parametrize(
    ("body", "op"),
    [
        (f"{CHUNKS} m = ReduceMean(r, two)  d = Sub(r, m)  q = Reshape(d, s)", ""),
        (f"{CHUNKS} m = ReduceMax(r, one)  d = Sub(r, m)  q = Reshape(d, s)", "ReduceMax"),
    ],
)
def test_chunks_stand_for_tokens_where_these_come_in_multiples(body: str, op: str) -> None:
    for tokens, multiple in (("8*n", 1), ("seq", 8)):
        found = classified(body, tokens=tokens, multiple=multiple).mixing
        assert [one.op for one in found] == [op] * bool(op)
    assert classified(body).mixing  # of any number of tokens chunks begin anew in every call


def test_without_states_nothing_is_classified() -> None:
    assert classify(graph("q = Relu(x)"), []).counts == {}


def test_masks_are_functions_of_the_distance() -> None:
    near = combined(
        "And",
        [
            combined("GreaterOrEqual", [linear(1, 0), constant(0)]),
            combined("Less", [linear(1, 0), constant(3)]),
        ],
    )
    assert near == Mask((0, 3), (LinearStep(0.0), LinearStep(1.0), LinearStep(0.0)))
    scores = combined("Where", [near, Mask(), constant(-1e9)])
    weights = combined("Softmax", [scores])
    assert weights.within(lambda x: x == 0) == (0, 2)
    assert combined("Less", [combined("Abs", [linear(1, 0)]), constant(3)]).within(
        lambda x: x == 0
    ) == (-2, 2)
    assert near.turned().within(lambda x: x == 0) == (-2, 0)
    assert near.shifted(5).within(lambda x: x == 0) == (5, 7)
