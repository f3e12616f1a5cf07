"""Passes: each is idempotent, order within a stage is free, each does what its docstring says."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from linexport import passes, trace
from linexport.graph import states
from linexport.passes import Pass, expose_past_present, split_sequence
from linexport.plugins.ops.op import DOMAIN
from linexport.sources import load_model

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS = ("language_model", "returns_state", "own_state", "parts", "masked")


Models = Callable[[str], onnx.ModelProto]


@pytest.fixture(scope="module")
def models(factories: SimpleNamespace) -> Models:
    return cache(lambda name: trace.trace(load_model(factories.source(name))).model)


def structure(graph: gs.Graph) -> object:
    """Everything of a graph but the order of its nodes and values."""
    graph.cleanup().toposort()
    nodes = sorted(
        repr((n.op, n.domain, [t.name for t in n.inputs], [t.name for t in n.outputs]))
        for n in graph.nodes
    )
    ends = [[(t.name, str(t.dtype), t.shape) for t in e] for e in (graph.inputs, graph.outputs)]
    return nodes, ends


def stage(name: str) -> list[Pass]:
    return [p for p in passes.all_passes() if name == p.stage]


def test_every_pass_belongs_to_a_stage() -> None:
    found = passes.all_passes()
    assert found
    assert all(p.stage in passes.STAGES and p.requires and p.ensures for p in found)
    assert len({p.name for p in found}) == len(found)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("found", passes.all_passes(), ids=lambda p: p.name)
def test_a_pass_says_whether_it_modified_and_run_twice_changes_nothing_more(
    models: Models, found: Pass, name: str
) -> None:
    graph = gs.import_onnx(models(name))
    before = structure(graph)
    assert found.run(graph).modified == (structure(graph) != before)
    once = structure(graph)
    assert not found.run(graph).modified
    assert structure(graph) == once


@pytest.mark.parametrize("name", MODELS)
def test_all_passes_run_twice_change_nothing_more(models: Models, name: str) -> None:
    once = passes.run(models(name))
    assert structure(gs.import_onnx(passes.run(once))) == structure(gs.import_onnx(once))


@pytest.mark.parametrize("name", MODELS)
def test_the_order_within_a_stage_does_not_matter(models: Models, name: str) -> None:
    before = gs.import_onnx(models(name))
    for where in passes.STAGES:
        results = []
        for order in itertools.islice(itertools.permutations(stage(where)), 6):
            graph = before.copy()
            for found in order:
                found.run(graph)
            results.append(structure(graph))
        assert all(r == results[0] for r in results)


# split_sequence


def split_model(
    sizes: Sequence[int] | int | None,
    reads: Sequence[int],
    axis: int = 1,
    width: int = 7,
    **attributes: int,
) -> onnx.ModelProto:
    """x (2, width) -> SplitToSequence -> one SequenceAt and one output per read."""
    constants = {f"i{n}": np.asarray(place, np.int64) for n, place in enumerate(reads)}
    if sizes is not None:
        constants["sizes"] = np.asarray(sizes, np.int64)
    nodes = [
        helper.make_node(
            "SplitToSequence",
            ["x", "sizes"] if sizes is not None else ["x"],
            ["parts"],
            axis=axis,
            **attributes,
        ),
        *(helper.make_node("SequenceAt", ["parts", f"i{n}"], [f"y{n}"]) for n in range(len(reads))),
    ]
    graph = helper.make_graph(
        nodes,
        "split",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, width])],
        [
            helper.make_tensor_value_info(f"y{n}", TensorProto.FLOAT, ["a", "b"])
            for n in range(len(reads))
        ],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def outputs(model: onnx.ModelProto) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    shape = session.get_inputs()[0].shape
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return session.run(None, {"x": x})


@pytest.mark.parametrize(
    ("sizes", "reads"),
    [
        ([3, 4], [0, 1]),
        ([1, 2, 4], [2, 0]),  # uneven, one part not read
        ([1, 2, 4], [-1, -3]),  # counted from the end
        ([3, 4], [0, 0, -2]),  # one part read three times
        (3, [0, 1, 2]),  # one size for all but the last
        (7, [0]),
        (9, [0]),  # a size larger than what there is
    ],
)
@pytest.mark.parametrize("axis", [1, -1])
def test_a_sequence_becomes_a_split(
    sizes: Sequence[int] | int, reads: list[int], axis: int
) -> None:
    model = split_model(sizes, reads, axis)
    rewritten = passes.run(model, ("canonicalise",))
    kinds = [n.op_type for n in rewritten.graph.node]
    assert kinds.count("Split") == 1
    assert not {"SplitToSequence", "SequenceAt"} & set(kinds)
    onnx.checker.check_model(rewritten, full_check=True)
    for expected, got in zip(outputs(model), outputs(rewritten), strict=True):
        np.testing.assert_array_equal(expected, got)


def kept_models() -> Iterator[tuple[str, onnx.ModelProto]]:
    yield "each member loses the axis", split_model(None, [0, 1], keepdims=0)
    model = split_model([3, 4], [0])
    model.graph.input.append(helper.make_tensor_value_info("i0", TensorProto.INT64, []))
    del model.graph.initializer[0]
    yield "the place is not known", model
    model = split_model([3, 4], [0])
    model.graph.output.append(
        helper.make_tensor_sequence_value_info("parts", TensorProto.FLOAT, None)
    )
    yield "the sequence is an output", model
    model = split_model([3, 4], [0])
    model.graph.node.append(helper.make_node("SequenceLength", ["parts"], ["n"]))
    model.graph.output.append(helper.make_tensor_value_info("n", TensorProto.INT64, []))
    yield "it is read by something else", model


@pytest.mark.parametrize("model", [pytest.param(m, id=why) for why, m in kept_models()])
def test_what_cannot_be_a_split_is_left_alone(model: onnx.ModelProto) -> None:
    graph = gs.import_onnx(model)
    before = structure(gs.import_onnx(model))
    split_sequence.run(graph)
    assert structure(graph) == before


def test_a_traced_chunk_and_split_become_splits(models: Models) -> None:
    kinds = [n.op_type for n in passes.run(models("parts")).graph.node]
    assert "SequenceAt" not in kinds and "SplitToSequence" not in kinds


# expose_state


def test_every_causal_node_gets_its_states(models: Models) -> None:
    model = passes.run(models("language_model"))
    assert [(s.past, s.present, s.op, s.shape) for s in states.find_states(model)] == [
        (f"past_{name}_{i}", f"present_{name}_{i}", op, ("batch", *shape))
        for i, name, op, shape in (
            (0, "conv", "CausalConvWithState", (32, 3)),
            (1, "state", "LinearAttention", (4, 8, 8)),
            (1, "normalizer", "LinearAttention", (4, 8)),
            (2, "conv", "CausalConvWithState", (32, 3)),
            (3, "state", "LinearAttention", (4, 8, 8)),
            (3, "normalizer", "LinearAttention", (4, 8)),
        )
    ]


def test_without_normaliser_there_is_only_the_state(models: Models) -> None:
    assert [s.past for s in states.find_states(passes.run(models("masked")))] == ["past_state_0"]


def test_a_given_past_begins_the_first_call_and_its_name_is_not_taken(models: Models) -> None:
    model = passes.run(models("own_state"))
    first, second = (n for n in model.graph.node if n.op_type == "LinearAttention")
    assert first.input[3] == "past_state_1/start"
    (choice,) = (n for n in model.graph.node if first.input[3] in n.output)
    assert choice.op_type == "Where" and choice.input[1:] == ["past_state_1", "past_state_0"]
    assert second.input[3:5] == ["past_state_2", "past_normalizer_2"]
    names = ["past_state_1_begun", "past_state_1", "past_state_2", "past_normalizer_2"]
    assert [i.name for i in model.graph.input] == ["x", "past_state_0", *names]
    given = [i.name for i in models("own_state").graph.input]
    assert {s.past for s in states.find_states(model, given)} == {*names}


def test_a_state_the_model_uses_itself_stays_its_own(
    models: Models,
) -> None:
    original = [o.name for o in models("returns_state").graph.output]
    model = passes.run(models("returns_state"))
    names = [o.name for o in model.graph.output]
    assert names == [*original, "present_state_0", "present_normalizer_0"]
    onnx.checker.check_model(model)


def test_a_bidirectional_node_has_no_state() -> None:
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["b", "t", 8]) for n in "qkvy"]
    node = helper.make_node(
        "LinearAttention", ["q", "k", "v"], ["y"], domain=DOMAIN, q_num_heads=2, kv_num_heads=2
    )
    node.attribute.append(helper.make_attribute("causal", 0))
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph([node], "one", info[:3], info[3:])
    found = gs.import_onnx(helper.make_model(graph, opset_imports=opsets))
    before = structure(found)
    expose_past_present.run(found)
    assert structure(found) == before


def test_stages_can_be_left_out(models: Models) -> None:
    model = passes.run(models("language_model"), passes.STATELESS)
    assert not states.find_states(model)
    assert [i.name for i in model.graph.input] == ["tokens"]


def test_transposed_weights_are_folded_unless_shared() -> None:
    n = 2**14  # large enough that storing it twice counts

    def graph(shared: bool) -> onnx.ModelProto:
        weight = numpy_helper.from_array(np.arange(2 * n, dtype=np.float32).reshape(2, n), "w")
        nodes = [
            helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
            helper.make_node("MatMul", ["x", "t"], ["y"]),
        ]
        outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])]
        if shared:
            nodes.append(helper.make_node("Identity", ["w"], ["z"]))
            outputs.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [2, n]))
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", n])
        made = helper.make_graph(nodes, "g", [x], outputs, [weight])
        return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)

    feeds = {"x": np.ones((4, n), np.float32)}
    for shared in (False, True):
        model = graph(shared)
        folded = passes.run(model)
        kinds = [n.op_type for n in folded.graph.node]
        assert ("Transpose" in kinds) == shared
        before, after = (
            onnxruntime.InferenceSession(m.SerializeToString()).run(["y"], feeds)[0]
            for m in (model, folded)
        )
        np.testing.assert_array_equal(before, after)


# absorb_feature_maps


def mapped_attention(**changes: Any) -> onnx.ModelProto:
    """q, k -> FeatureMap each -> causal LinearAttention; ``changes`` make it unfit."""
    sides = [changes.get(side, {}) for side in ("query", "key")]
    nodes = [
        helper.make_node(
            "FeatureMap",
            [x],
            [f"phi_{x}"],
            domain=DOMAIN,
            **{"kind": "elu1", "num_heads": 2, "side": side, **change},
        )
        for x, side, change in zip("qk", ("query", "key"), sides, strict=True)
    ]
    heads = {"q_num_heads": 2, "kv_num_heads": 2, "causal": changes.get("causal", 1)}
    nodes.append(
        helper.make_node("LinearAttention", ["phi_q", "phi_k", "v"], ["o"], domain=DOMAIN, **heads)
    )
    outputs = ["o", *changes.get("outputs", [])]
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["B", "T", 8]) for n in "qkv"]
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["B", "T", 8]) for n in outputs]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph(nodes, "mapped", infos, ends)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def test_feature_maps_are_absorbed_by_the_attention_that_reads_them() -> None:
    model = passes.run(mapped_attention(), ("absorb",))
    (node,) = model.graph.node
    assert list(node.input) == ["q", "k", "v"]
    assert {a.name: a.s for a in node.attribute if a.name == "feature_map"} == {
        "feature_map": b"elu1"
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"causal": 0},
        {"key": {"kind": "relu"}},
        {"outputs": ["phi_q"]},
        {"outputs": ["phi_k"]},
    ],
    ids=["bidirectional", "different maps", "query features read", "key features read"],
)
def test_feature_maps_that_others_need_stay(changes: dict[str, Any]) -> None:
    before = mapped_attention(**changes)
    after = passes.run(before, ("absorb",))
    assert [n.op_type for n in after.graph.node] == [n.op_type for n in before.graph.node]


# cancel_transposes


@pytest.mark.parametrize(
    ("second", "read", "left"),
    [
        ([0, 2, 1, 3], ["b"], ["Exp"]),
        ([0, 1, 3, 2], ["b"], ["Transpose", "Exp"]),
        ([0, 2, 1, 3], ["a", "b"], ["Transpose", "Exp"]),
    ],
    ids=["back again", "to a third layout", "the layout between is read"],
)
def test_transposes_are_merged(second: list[int], read: list[str], left: list[str]) -> None:
    nodes = [
        helper.make_node("Transpose", ["x"], ["a"], perm=[0, 2, 1, 3]),
        helper.make_node("Transpose", ["a"], ["t"], perm=second),
        helper.make_node("Exp", ["t"], ["b"]),
    ]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 4, 5])
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in read]
    graph = helper.make_graph(nodes, "transposed", [given], ends)
    before = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    after = passes.run(before, ("tidy",))
    assert [n.op_type for n in after.graph.node] == left
    x = {"x": np.random.default_rng(0).normal(size=(2, 3, 4, 5)).astype(np.float32)}
    for got, expected in zip(
        ReferenceEvaluator(after).run(None, x), ReferenceEvaluator(before).run(None, x), strict=True
    ):
        np.testing.assert_array_equal(got, expected)


# divide_by_roots


@pytest.mark.parametrize(
    ("width", "left"),
    [
        (64, ["ReduceSumSquare", "Sqrt", "Div"]),
        (16, ["ReduceSumSquare", "Sqrt", "Reciprocal", "Mul"]),
    ],
)
def test_long_rows_are_divided_by_their_root(width: int, left: list[str]) -> None:
    before = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 20]> norm (float[n, {width}] x) => (float[n, {width}] y)
        <int64[1] last = {{-1}}>
        {{ sum = ReduceSumSquare (x, last)  root = Sqrt (sum)  factor = Reciprocal (root)
           y = Mul (x, factor) }}
    """)
    after = passes.run(before, ("canonicalise",))
    assert [n.op_type for n in after.graph.node] == left
    x = {"x": np.random.default_rng(0).normal(size=(3, width)).astype(np.float32)}
    for got, expected in zip(
        ReferenceEvaluator(after).run(None, x), ReferenceEvaluator(before).run(None, x), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
