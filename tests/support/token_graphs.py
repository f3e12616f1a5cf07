"""Random graphs of operators along the tokens, with states that are right, or wrong in small ways.

Whether such a graph streams is measured: fed in pieces it gives what it gives whole, or not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from linexport.graph.states import State
from linexport.plugins.ops.op import DOMAIN
from linexport.plugins.ops.registry import attach_functions, register_schemas

WIDTH = 4
PIECES = {1: ((5, 1, 9, 2, 1, 14), (1, 1, 30), (20, 12)), 4: ((4, 8, 4, 16), (4, 28), (16, 16))}
"""Lengths of pieces, of sequences of any length and of multiples of 4."""

LIMIT = 1e-3


@dataclass
class Graph:
    """A graph as it grows.

    Attributes:
        choose: draws.
        unit: what the number of tokens is a multiple of.
        states: of it.
    """

    choose: random.Random
    unit: int
    nodes: list[Any] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    counted: str = ""

    @property
    def tokens(self) -> str:
        return "seq" if self.unit == 1 else f"{self.unit}*n"

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        domain = attributes.pop("domain", "")
        self.nodes.append(
            helper.make_node(op, list(inputs), [name], name, domain=domain, **attributes)
        )
        return name

    def held(self, value: Any, dtype: Any = np.int64) -> str:
        name = f"c{len(self.weights)}"
        self.weights[name] = np.asarray(value, dtype)
        return name

    def weight(self, *shape: int) -> str:
        values = np.random.default_rng(self.choose.randrange(1 << 30)).normal(size=shape)
        return self.held(values / max(shape[0], 1) ** 0.5, np.float32)

    def length(self, x: str = "x", axis: int = 1) -> str:
        return self.node("Shape", x, start=axis, end=axis + 1)

    def slice(self, x: str, start: Any, end: Any, axis: int = 1, step: int = 1) -> str:
        ends = [e if isinstance(e, str) else self.held([e]) for e in (start, end)]
        return self.node("Slice", x, *ends, self.held([axis]), self.held([step]))

    def rows(self, x: str, count: int) -> str:
        """x behind rows of the past; the state is sometimes another."""
        number = len(self.states)
        past, present = f"past_inputs_{number}", f"present_inputs_{number}"
        shape = ["batch", count, WIDTH]
        self.inputs.append(helper.make_tensor_value_info(past, TensorProto.FLOAT, shape))
        self.outputs.append(helper.make_tensor_value_info(present, TensorProto.FLOAT, shape))
        seen = self.node("Concat", past, x, axis=1)
        late = self.choose.random() < 0.05
        kept = self.slice(seen, -count - late, -1 if late else 1 << 62)
        if self.choose.random() < 0.05:
            kept = self.node("Tanh", kept)
        self.nodes.append(helper.make_node("Identity", [kept], [present], present))
        self.states.append(State(past, present, "float32", tuple(shape), "Conv"))
        return seen

    def positions(self) -> str:
        """Places of the tokens; sometimes from the first of a call on."""
        zero, one = self.held(0), self.held(1)
        place = self.node("Range", zero, self.node("Squeeze", self.length()), one)
        if self.choose.random() < 0.2:
            return place
        if not self.counted:
            self.counted = self.node("Add", "past_length", self.length())
        return self.node("Add", place, "past_length")


Step = Callable[[Graph, str, str], str]
STEPS: list[Step] = []


def step(function: Step) -> Step:
    STEPS.append(function)
    return function


@step
def entries(g: Graph, x: str, y: str) -> str:
    op = g.choose.choice(["Relu", "Tanh", "Neg", "Sigmoid"])
    return g.node(g.choose.choice(["Add", "Mul", "Sub"]), g.node(op, x), y)


@step
def projected(g: Graph, x: str, y: str) -> str:
    both = g.node("Concat", x, y, axis=-1)
    return g.node("MatMul", both, g.weight(2 * WIDTH, WIDTH))


@step
def delayed(g: Graph, x: str, y: str) -> str:
    count = g.choose.choice([1, 2, 5, 11]) * g.unit
    seen, place = g.rows(x, count), g.choose.randrange(count + 1)
    kind = g.choose.randrange(3)
    if kind == 0:
        end = g.node("Add", g.length(), g.held([place]))
        late = g.slice(seen, place, end)
    elif kind == 1:
        late = g.slice(g.slice(seen, place, 1 << 62), 0, place - count or 1 << 62)
    else:
        index = g.node("Range", g.held(0), g.node("Squeeze", g.length()), g.held(1))
        late = g.node("Gather", seen, g.node("Add", index, g.held(place)), axis=1)
    return g.node(g.choose.choice(["Add", "Sub"]), late, y)


@step
def convolved(g: Graph, x: str, y: str) -> str:
    gap, taps = g.choose.choice([1, 3]), g.choose.choice([2, 3])
    reach = gap * (taps - 1)
    kind = g.choose.randrange(4)
    seen = g.rows(x, reach + kind % 2) if kind < 3 else x
    first = g.node("Transpose", seen, perm=[0, 2, 1])
    pads = [reach, 0] if kind == 3 else [0, 0]
    made = g.node("Conv", first, g.weight(WIDTH, WIDTH, taps), dilations=[gap], pads=pads)
    last = g.node("Transpose", made, perm=[0, 2, 1])
    return g.node("Add", g.slice(last, kind % 2, 1 << 62) if kind < 3 else last, y)


@step
def pooled(g: Graph, x: str, y: str) -> str:
    width = g.choose.choice([2, 4])
    first = g.node("Transpose", g.rows(x, width - 1), perm=[0, 2, 1])
    op = g.choose.choice(["AveragePool", "MaxPool"])
    made = g.node(op, first, kernel_shape=[width], strides=[1])
    return g.node("Add", g.node("Transpose", made, perm=[0, 2, 1]), y)


@step
def unfolded(g: Graph, x: str, y: str) -> str:
    count, width = 5, g.choose.choice([2, 6, 7])
    seen = g.rows(x, count)
    i = g.node("Range", g.held(0), g.node("Squeeze", g.length()), g.held(1))
    index = g.node("Add", g.node("Unsqueeze", i, g.held([1])), g.held([np.arange(width)]))
    if width > count + 1:
        index = g.node("Sub", index, g.held(g.choose.randrange(2)))
        index = g.node("Max", index, g.held(0)) if g.choose.random() < 0.5 else index
    windows = g.node("Gather", seen, index, axis=1)
    return g.node("Add", g.node("ReduceMean", windows, g.held([2]), keepdims=0), y)


@step
def attended(g: Graph, x: str, y: str) -> str:
    """Softmax, or a product, over keys at some distances."""
    count = g.choose.choice([0, 3, 8])
    seen = g.rows(y, count) if count else y
    low, high = g.choose.choice([0, 0, 1, -1]), g.choose.choice([2, 3, 8, 9, 1000])
    total = g.node("Squeeze", g.length(seen))
    column = g.node("Range", g.held(0), total, g.held(1))
    row = g.slice(column, g.node("Neg", g.length()), 1 << 62, 0)
    apart = g.node("Sub", g.node("Unsqueeze", row, g.held([1])), column)
    near = g.node("LessOrEqual", apart, g.held(high))
    mask = g.node("And", g.node("GreaterOrEqual", apart, g.held(low)), near)
    if g.choose.random() < 0.3:
        mask = g.node("Less", g.node("Abs", apart), g.held(high + 1))
    scores = g.node("MatMul", x, g.node("Transpose", seen, perm=[0, 2, 1]))
    if g.choose.random() < 0.5:
        low_value = g.held(g.choose.choice([-1e9, -5.0]), np.float32)
        weights = g.node("Softmax", g.node("Where", mask, scores, low_value), axis=-1)
    else:
        weights = g.node("Mul", scores, g.node("Cast", mask, to=1))
    return g.node("Add", g.node("Tanh", g.node("MatMul", weights, seen)), x)


@step
def placed(g: Graph, x: str, y: str) -> str:
    place = g.node("Cast", g.positions(), to=1)
    if g.choose.random() < 0.2:
        place = g.node("Div", place, g.node("Cast", g.length(), to=1))
    wave = g.node("Sin", g.node("Unsqueeze", place, g.held([1])))
    return g.node("Add", x, g.node("Mul", wave, y))


@step
def chunked(g: Graph, x: str, y: str) -> str:
    if g.unit == 1:
        return entries(g, x, y)
    chunks = g.node("Reshape", x, g.held([0, -1, g.unit, WIDTH]))
    kind = g.choose.randrange(4)
    if kind == 0:
        chunks = g.node("Softmax", chunks, axis=2)
    elif kind == 1:
        chunks = g.node("Sub", chunks, g.node("ReduceMean", chunks, g.held([2])))
    elif kind == 2:
        chunks = g.node("CumSum", chunks, g.held(2))
    else:
        chunks = g.node("Sub", chunks, g.node("ReduceMax", chunks, g.held([1, 2])))
    return g.node("Add", g.node("Reshape", chunks, g.held([0, -1, WIDTH])), y)


@step
def merged(g: Graph, x: str, y: str) -> str:
    flat = g.node("Reshape", x, g.held([-1, WIDTH]))
    flat = g.node("MatMul", flat, g.weight(WIDTH, WIDTH))
    return g.node("Add", g.node("Reshape", flat, g.node("Shape", y)), y)


@step
def wrong(g: Graph, x: str, y: str) -> str:
    """What mixes tokens."""
    kind = g.choose.randrange(7)
    if kind == 0:
        pads = g.node("Pad", x, g.held([0, 2, 0, 0, 0, 0]))
        return g.node("Add", g.slice(pads, 0, g.length()), y)
    if kind == 1:
        return g.node("Add", g.slice(g.node("Pad", x, g.held([0, 0, 0, 0, 2, 0])), 2, 1 << 62), y)
    if kind == 2:
        return g.node("Add", g.node("ReduceMean", x, g.held([1])), y)
    if kind == 3:
        return g.node("Add", g.slice(x, -1, 1 << 62), y)
    if kind == 4:
        return g.node("Add", g.slice(x, 0, 1), y)
    if kind == 5:
        return g.node("Add", g.slice(x, -1, -(1 << 62), step=-1), y)
    return g.node("Tanh", g.node("CumSum", x, g.held(1)))


@dataclass(frozen=True)
class Drawn:
    """A graph, its states, and what its tokens come in multiples of."""

    model: onnx.ModelProto
    states: tuple[State, ...]
    unit: int


def draw(seed: int, steps: int = 3) -> Drawn:
    """Draw a graph whose last node is linear attention with a state."""
    register_schemas()
    choose = random.Random(seed)
    g = Graph(choose, choose.choice([1, 1, 1, 4]))
    values = ["x"]
    for _ in range(choose.randint(1, steps)):
        function = choose.choice(STEPS if choose.random() < 0.8 else STEPS[:-1])
        values.append(function(g, choose.choice(values[-2:]), choose.choice(values[-2:])))
    shape = ["batch", g.tokens, WIDTH]
    q = values[-1]
    attention = helper.make_node(
        "LinearAttention",
        [q, q, q, "past_state_0"],
        ["a", "present_state_0"],
        "attention",
        domain=DOMAIN,
        q_num_heads=1,
        kv_num_heads=1,
        scale=0.1,
    )
    g.nodes += [attention, helper.make_node("Add", ["a", q], ["z"], "last")]
    held = ["batch", 1, WIDTH, WIDTH]
    names = [("past_state_0", "present_state_0", TensorProto.FLOAT, held)]
    g.states.append(
        State("past_state_0", "present_state_0", "float32", tuple(held), "LinearAttention")
    )
    if g.counted:
        g.nodes.append(helper.make_node("Identity", [g.counted], ["present_length"], "counted"))
    if any("past_length" in node.input for node in g.nodes):
        names.append(("past_length", "present_length", TensorProto.INT64, [1]))
        g.states.append(State("past_length", "present_length", "int64", (1,), "Positions"))
    info = helper.make_tensor_value_info
    inputs = [info("x", TensorProto.FLOAT, shape), *g.inputs]
    inputs += [info(past, kind, size) for past, _, kind, size in names]
    outputs = [info("z", TensorProto.FLOAT, shape), *g.outputs]
    outputs += [info(present, kind, size) for _, present, kind, size in names]
    weights = [numpy_helper.from_array(value, name) for name, value in g.weights.items()]
    graph = helper.make_graph(
        g.nodes, "g", inputs, outputs, weights, value_info=[info(q, 1, shape)]
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return Drawn(model, tuple(g.states), g.unit)


def streams(drawn: Drawn, seed: int = 0) -> bool:
    """Return whether all splits give what the whole gives."""
    model = onnx.ModelProto()
    model.CopyFrom(drawn.model)
    attach_functions(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    start = {s.past: s.start(2) for s in drawn.states}
    x = np.random.default_rng(seed).standard_normal((2, 32, WIDTH)).astype(np.float32)
    names = [o.name for o in session.get_outputs()]
    whole = dict(zip(names, session.run(names, {"x": x, **start}), strict=True))
    return all(
        _same(session, names, drawn.states, x, pieces, whole) for pieces in PIECES[drawn.unit]
    )


def _same(
    session: Any,
    names: Sequence[str],
    states: Sequence[State],
    x: np.ndarray,
    pieces: Sequence[int],
    whole: dict[str, np.ndarray],
) -> bool:
    carried, begin, parts = {s.past: s.start(2) for s in states}, 0, []
    for size in pieces:
        fed = {"x": x[:, begin : begin + size], **carried}
        try:
            found = dict(zip(names, session.run(names, fed), strict=True))
        except Exception:  # ONNX Runtime has no class for its own
            return False
        carried, begin = {s.past: found[s.present] for s in states}, begin + size
        parts.append(found["z"])
    pairs = [(np.concatenate(parts, 1), whole["z"])]
    pairs += [(carried[s.past], whole[s.present]) for s in states]
    return all(a.shape == b.shape and _near(a, b) for a, b in pairs)


def _near(a: np.ndarray, b: np.ndarray) -> bool:
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return False
    return bool(np.abs(a - b).max(initial=0) <= LIMIT * max(np.abs(b).max(initial=0), 1e-6))
