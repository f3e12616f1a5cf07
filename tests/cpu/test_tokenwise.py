"""Programs of the CPU library against the nodes they are made of, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from linexport.targets.base import OrtSession
from linexport.targets.cpu_fusion import OP, with_programs
from tests.support.comparison import assert_close
from tests.support.native import session

Arrays = dict[str, np.ndarray]
TIMES = 4
"""Values of ``x`` for one of its slices."""


class Drawn:
    """A graph of nodes between an input x (B, T, H d) and results, written in one type.

    ``opaque`` puts a node in the way that no program has.
    """

    def __init__(self, heads: int, width: int, kind: int = TensorProto.FLOAT) -> None:
        self.heads, self.width, self.kind = heads, width, kind
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.infos: list[onnx.ValueInfoProto] = []
        rng = np.random.default_rng(0)
        self.per_head = self.weight(rng.normal(size=(heads, 1)))
        self.per_channel = self.weight(rng.normal(size=width))

    def weight(self, values: object, dtype: type | None = None) -> str:
        name = f"w{len(self.constants)}"
        wanted = dtype or helper.tensor_dtype_to_np_dtype(self.kind)
        self.constants.append(numpy_helper.from_array(np.asarray(values, wanted), name))
        return name

    def node(
        self, op: str, *inputs: str, sizes: Sequence[int] | None = None, **more: object
    ) -> str:
        """Append a node; ``sizes`` are those of its value behind batch and token."""
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], f"node_{name}", **more))
        shape = ["B", "T", *(sizes or (self.heads, self.width))]
        self.infos.append(helper.make_tensor_value_info(name, self.kind, shape))
        return name

    def split_heads(self, x: str) -> str:
        return self.node("Reshape", x, self.weight([0, 0, self.heads, self.width], np.int64))

    def packed(self, x: str) -> str:
        whole = self.heads * self.width
        return self.node("Reshape", x, self.weight([0, 0, whole], np.int64), sizes=[whole])

    def reduced(self, op: str, x: str) -> str:
        return self.node(op, x, self.weight([-1], np.int64), sizes=[self.heads, 1])

    def norm(self, x: str) -> str:
        """x / sqrt(mean x^2 + eps), as exporters write it."""
        mean = self.reduced("ReduceMean", self.node("Pow", x, self.weight(2.0)))
        root = self.node("Sqrt", self.node("Add", mean, self.weight(0.25)), sizes=[self.heads, 1])
        self.infos[-2].CopyFrom(self.infos[-1])
        self.infos[-2].name = self.nodes[-2].output[0]
        return self.node("Mul", self.node("Div", x, root), self.per_channel)

    def softplus(self, x: str) -> str:
        """log(1 + exp x), of large x itself."""
        log = self.node("Log", self.node("Add", self.node("Exp", x), self.weight(1.0)))
        large = self.node("Greater", x, self.weight(20.0))
        self.infos.pop()  # true or false
        return self.node("Where", large, x, log)

    def gated(self, x: str) -> str:
        return self.node("Mul", x, self.node("Sigmoid", x))

    def turned(self, x: str) -> str:
        """(-x[half:], x[:half]) along the channels."""
        half, rest = self.width // 2, self.width - self.width // 2
        cut = [self.weight([n], np.int64) for n in (0, half, self.width, -1)]
        first = self.node("Slice", x, cut[0], cut[1], cut[3], sizes=[self.heads, half])
        second = self.node("Slice", x, cut[1], cut[2], cut[3], sizes=[self.heads, rest])
        second = self.node("Neg", second, sizes=[self.heads, rest])
        return self.node("Concat", second, first, axis=-1)

    def of_heads(self, x: str) -> str:
        return self.node(
            "Mul",
            x,
            self.node("Relu", self.node("Softplus", x)) if self.width > 2 else self.per_head,
        )

    def centred(self, x: str) -> str:
        total = self.reduced("ReduceSum", x)
        return self.node(
            "Sub", x, self.node("Mul", total, self.weight(1 / self.width), sizes=[self.heads, 1])
        )

    def bounded(self, x: str) -> str:
        return self.node("Max", self.node("Min", x, self.weight(1.5)), self.per_head)

    def clipped(self, x: str) -> str:
        low, high = self.weight(-0.5), self.weight(0.75)
        floored = self.node("Clip", self.node("Clip", x, low, high), low)
        return self.node("Clip", self.node("Clip", floored, "", high))

    def flat(self, x: str) -> str:
        """The norm of rows, batch, token and head being one axis of them."""
        rows = self.node("Reshape", x, self.weight([-1, self.width], np.int64))
        self.infos.pop()
        absolute = self.node("Abs", rows)
        self.infos.pop()
        return self.node("Reshape", absolute, "sizes", allowzero=1)

    def opaque(self, x: str) -> str:
        return self.node("Elu", x)

    def model(self, results: Sequence[str]) -> onnx.ModelProto:
        whole = self.heads * self.width
        info = helper.make_tensor_value_info
        given = [info("x", self.kind, ["B", "T", whole]), info("sizes", TensorProto.INT64, [4])]
        ends = [v for v in self.infos if v.name in results]
        infos = [v for v in self.infos if v.name not in results]
        graph = helper.make_graph(
            self.nodes, "drawn", given, ends, self.constants, value_info=infos
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


STEPS = (
    *("norm", "softplus", "gated", "turned", "of_heads", "centred", "bounded", "clipped", "flat"),
    "opaque",
)


def drawn(steps: Sequence[tuple[str, int]], heads: int, width: int, kind: int) -> onnx.ModelProto:
    """Steps on a value that an earlier step made; what nothing reads is a result."""
    made = Drawn(heads, width, kind)
    values = [made.split_heads("x")]
    for name, source in steps:
        values.append(getattr(made, name)(values[source % len(values)]))
        values[-1] = made.node("Add", values[-1], values[(source + 1) % len(values)])
    read = {name for node in made.nodes for name in node.input}
    results = [name for node in made.nodes for name in node.output if name not in read]
    return made.model([*results[:-1], made.packed(results[-1])])


def feeds(heads: int, width: int, batch: int, length: int) -> Arrays:
    x = np.random.default_rng(length).normal(size=(batch, length, heads * width))
    return {"x": np.float32(x), "sizes": np.array([batch, length, heads, width])}


def in_float64(write: Callable[[int], onnx.ModelProto], x: Arrays) -> list[np.ndarray]:
    evaluator = ReferenceEvaluator(write(TensorProto.DOUBLE))
    return list(evaluator.run(None, {**x, "x": x["x"].astype(np.float64)}))


@pytest.mark.smoke
@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9)), min_size=1, max_size=6),
    sizes=st.tuples(st.integers(1, 5), st.integers(2, 40)),
    batch=st.integers(1, 2),
    length=st.sampled_from([0, 1, 2, 9]),
    threads=st.integers(1, 3),
)
def test_equals_float64(
    steps: list[tuple[str, int]], sizes: tuple[int, int], batch: int, length: int, threads: int
) -> None:
    x = feeds(*sizes, batch, length)
    plain = drawn(steps, *sizes, TensorProto.FLOAT)
    fused = with_programs(plain)
    assert any(node.op_type == OP for node in fused.graph.node)
    want = [np.float64(y) for y in OrtSession(plain.SerializeToString(), 1).run(x).values()]
    if length:  # onnx.reference reduces no empty axes
        want = in_float64(lambda kind: drawn(steps, *sizes, kind), x)
    got = session(fused, threads).run(None, x)
    assert_close(got, want, [np.abs(y).max(initial=1) + np.abs(y) for y in want], 3e-6)
    by_function = OrtSession(fused.SerializeToString(), 1).run(x).values()
    assert_close(
        list(by_function), want, [np.abs(y).max(initial=1) + np.abs(y) for y in want], 3e-6
    )


def one_step(op: str, kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    made = Drawn(1, TIMES, kind)
    value = made.node(op, made.split_heads("x"))
    return made.model([made.packed(value)])


@pytest.mark.parametrize(
    ("op", "rtol"),
    [
        ("Exp", 3e-7),
        ("Log", 3e-7),
        ("Sigmoid", 4e-7),
        ("Softplus", 4e-7),
        ("Sqrt", 1e-7),
        ("Neg", 0),
    ],
)
def test_functions_of_extreme_values(op: str, rtol: float) -> None:
    rng = np.random.default_rng(0)
    wide = rng.normal(size=400) * 10.0 ** rng.integers(-30, 30, 400)
    near = rng.normal(size=400) * 10.0 ** rng.integers(-4, 3, 400)
    ends = [0.0, 1.0, 1e-40, 1e-38, 3e38, np.inf, -np.inf, np.nan, 88.0, -87.0, -104.0, 1 + 1e-7]
    values = np.float32([*wide, *near, *ends])
    if op in ("Log", "Sqrt"):
        values = np.abs(values)
    x = {"x": values.reshape(1, -1, TIMES), "sizes": np.zeros(4, np.int64)}
    with np.errstate(all="ignore"):
        want = in_float64(lambda kind: one_step(op, kind), x)[0]
        want = np.where(np.abs(want) > np.finfo(np.float32).max, np.copysign(np.inf, want), want)
    got = session(with_programs(one_step(op))).run(["v2"], x)
    # Below 1.2e-38 exponentials are zero.
    assert_close(got, [want], [np.abs(want)], rtol, 1.2e-38)


def layer() -> onnx.ModelProto:
    made = Drawn(16, 128)
    heads = made.split_heads("x")
    value = made.norm(made.gated(heads))
    return made.model(
        [made.packed(made.opaque(made.turned(value))), made.packed(made.softplus(value))]
    )


def test_bounds_are_in_a_program_where_they_are_numbers() -> None:
    """A bound that is computed leaves the node to the runtime."""
    x = feeds(2, 8, 1, 3)
    made = Drawn(2, 8)
    known = made.model([made.packed(made.clipped(made.gated(made.split_heads("x"))))])
    assert {node.op_type for node in with_programs(known).graph.node} == {OP}
    want = list(OrtSession(known.SerializeToString(), 1).run(x).values())
    for a, b in zip(session(with_programs(known)).run(None, x), want, strict=True):
        assert np.abs(b).max() <= 0.75
        np.testing.assert_allclose(a, b, 1e-6)
    known.graph.node.insert(0, helper.make_node("ReduceMax", ["x"], ["top"], keepdims=0))
    clips = [node for node in known.graph.node if node.op_type == "Clip"]
    clips[0].input[2] = "top"
    assert "Clip" in {node.op_type for node in with_programs(known).graph.node}


def test_same_bits_whatever_the_threads() -> None:
    x, model = feeds(16, 128, 2, 70), with_programs(layer())
    alone, shared = (session(model, threads).run(None, x) for threads in (1, 3))
    for a, b in zip(alone, shared, strict=True):
        np.testing.assert_array_equal(a, b)


def test_nodes_between_others_are_one() -> None:
    """Two groups, with the opaque node between them; of one node alone no program is made."""
    model = with_programs(layer())
    assert [node.op_type for node in model.graph.node if node.op_type != OP] == ["Elu", "Reshape"]
    assert sum(node.op_type == OP for node in model.graph.node) == 1
    plain = one_step("Elu")
    assert with_programs(plain) is plain


def test_without_the_library_the_same_nodes_run() -> None:
    x = feeds(16, 128, 1, 5)
    plain, fused = (m.SerializeToString() for m in (layer(), with_programs(layer())))
    for a, b in zip(
        OrtSession(plain, 1).run(x).values(), OrtSession(fused, 1).run(x).values(), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_a_cycle_is_left_to_the_runtime() -> None:
    model = layer()
    model.graph.node[1].input[0] = model.graph.node[-1].output[0]
    with pytest.raises(Exception, match=r"acyclic|[Tt]opological|INVALID_GRAPH"):
        session(with_programs(model))


def program_of(model: onnx.ModelProto) -> onnx.AttributeProto:
    [attribute] = [a for n in model.graph.node for a in n.attribute if a.name == "program"]
    return attribute


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(
    at=st.floats(0, 1, exclude_max=True),
    word=st.sampled_from(["-1", "0", "1", "7", "99999999", "Neg", "Mean", ""]),
)
def test_damaged_programs_are_refused_or_stay_in_their_memories(at: float, word: str) -> None:
    model = with_programs(layer())
    attribute = program_of(model)
    words = attribute.s.decode().split()
    words[int(at * len(words))] = word
    attribute.s = " ".join(words).encode()
    try:
        session(model).run(None, feeds(16, 128, 1, 1))
    except Exception as error:  # ONNX Runtime has no class for its own
        assert "Tokenwise: " in str(error) or "inputs" in str(error) or "output" in str(error), (
            error
        )


def test_inputs_of_another_size_are_refused() -> None:
    model = with_programs(one_step("Exp"))
    for value in model.graph.input:
        value.type.tensor_type.ClearField("shape")
    with pytest.raises(Exception, match="Tokenwise: "):
        session(model).run(
            None, {"x": np.zeros((1, 1, 5), np.float32), "sizes": np.zeros(4, np.int64)}
        )
