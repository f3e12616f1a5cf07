"""The pass manager: records, dumps, stopping, its checks, and why a rewrite did not fire."""

from __future__ import annotations

import itertools
import logging
import re
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from onnx import numpy_helper, parser

from linexport import passes
from linexport.errors import BuildError, UsageError
from linexport.graph.external_data import LARGE
from linexport.passes import GraphDump, Pass, PassResult
from linexport.passes.diff import graph_diff
from linexport.passes.manager import run_passes

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 64


@pytest.fixture
def model() -> onnx.ModelProto:
    """A norm by a reciprocal root, an Identity, and a product with a large weight."""
    made = parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 20]>
        norm (float[n, {WIDTH}] x) => (float[n, {2**13}] y)
        <int64[1] last = {{-1}}>
        {{ squares = ReduceSumSquare (x, last)  root = Sqrt (squares)  factor = Reciprocal (root)
           unit = Mul (x, factor)  same = Identity (unit)  y = MatMul (same, weight) }}
    """)
    for node in made.graph.node:
        node.name = f"n/{node.output[0]}"
    weight = np.ones((WIDTH, 2**13), np.float32)
    assert weight.nbytes > LARGE
    made.graph.initializer.append(numpy_helper.from_array(weight, "weight"))
    return made


def test_every_pass_is_recorded(model: onnx.ModelProto) -> None:
    records = passes.rewrite(model).records
    assert [(r.name, r.stage) for r in records] == [
        (p.name, p.stage) for s in passes.STAGES for p in passes.all_passes() if p.stage == s
    ]
    for one, following in itertools.pairwise(records):
        assert one.nodes_after == following.nodes_before
    assert {r.name for r in records if r.changed} == {"rsqrt_to_div", "simplify"}
    assert records[0].nodes_before == 6 and records[-1].nodes_after == 4
    assert all(r.seconds >= 0 for r in records)


def test_a_dump_has_the_graph_around_every_change_without_weights(
    model: onnx.ModelProto, tmp_path: Path
) -> None:
    dump = GraphDump(tmp_path / "dump")
    rewritten = passes.rewrite(model, dump=dump)
    changed = [
        f"{number:02}_{record.name}"
        for number, record in enumerate(rewritten.records, 1)
        if record.changed
    ]
    names = {p.name for p in dump.folder.iterdir()}
    assert names == {"00_traced.onnx", "result.onnx"} | {
        f"{stem}.{part}" for stem in changed for part in ("before.onnx", "after.onnx", "diff")
    }
    for stem in changed:
        before, after = (
            onnx.load(dump.folder / f"{stem}.{side}.onnx", load_external_data=False)
            for side in ("before", "after")
        )
        assert [i.name for i in before.graph.input] == ["x"]
        assert len(after.graph.node) < len(before.graph.node)
        assert max(p.stat().st_size for p in dump.folder.iterdir()) < 4096
    [weight] = [t for t in rewritten.model.graph.initializer if t.name == "weight"]
    assert (numpy_helper.to_array(weight) == 1).all(), "the conversion itself keeps its weights"


def test_a_diff_reads_as_text(model: onnx.ModelProto, tmp_path: Path) -> None:
    dump = GraphDump(tmp_path)
    passes.rewrite(model, dump=dump)
    [path] = tmp_path.glob("*_rsqrt_to_div.diff")
    lines = path.read_text().splitlines()
    assert lines[0] == "rsqrt_to_div (stage canonicalise)"
    assert lines[3:] == [
        "nodes 6 -> 5, initializers 2 -> 2",
        "",
        "removed (1)",
        '- Reciprocal "n/factor" (root) -> (factor)',
        "",
        "changed (1)",
        '~ Div "n/unit" (x, root) -> (unit)',
        "    op: Mul -> Div",
        "    inputs: x, factor -> x, root",
    ]


def test_a_diff_names_inputs_outputs_initializers_and_attributes() -> None:
    head = '<ir_version: 10, opset_import: ["": 20]>'
    before = parser.parse_model(
        f"{head} g (float[a, 4] x) => (float[a, 4] y) <float[1] c = {{1}}>"
        "{ [t] y = Transpose <perm = [0, 1]> (x) }"
    )
    after = parser.parse_model(
        f"{head} g (float[a, 4] x, float[a] p) => (float[a, 4] y) "
        "{ [t] y = Transpose <perm = [1, 0]> (x)  [new] z = Neg (p) }"
    )
    text = graph_diff(before, after)
    assert "inputs added (1)\n+ p float[a]\n" in text
    assert "initializers removed (1)\n- c float[1]\n" in text
    assert '+ Neg "new" (p) -> (z)\n' in text
    assert "    perm: [0, 1] -> [1, 0]\n" in text
    assert "removed (0)" not in text


def test_equal_graphs_differ_in_nothing(model: onnx.ModelProto) -> None:
    assert graph_diff(model, model) == "nodes 6 -> 6, initializers 2 -> 2\n"


def test_the_pipeline_stops_after_a_pass(model: onnx.ModelProto, tmp_path: Path) -> None:
    rewritten = passes.rewrite(model, dump=GraphDump(tmp_path), stop_after="rsqrt_to_div")
    assert rewritten.records[-1].name == "rsqrt_to_div"
    result = onnx.load(tmp_path / "result.onnx", load_external_data=False)
    assert [n.op_type for n in result.graph.node] == [n.op_type for n in rewritten.model.graph.node]
    assert "Div" in {n.op_type for n in result.graph.node}
    assert "Identity" in {n.op_type for n in result.graph.node}


def test_an_unknown_pass_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"Unknown pass 'nonsense'.*fold_transposes.*simplify"):
        passes.find_pass("nonsense")


def test_a_dump_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(UsageError, match="is not empty"):
        GraphDump(tmp_path)
    with pytest.raises(UsageError, match="Cannot make the folder"):
        GraphDump(tmp_path / "mine" / "below")
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_stateless_pass_may_not_change_inputs(model: onnx.ModelProto) -> None:
    def run(graph: gs.Graph) -> PassResult:
        graph.inputs.append(gs.Variable("more", np.float32, [1]))
        return PassResult(True)

    greedy = Pass("greedy", "tidy", "nothing", run)
    with pytest.raises(BuildError, match=r"The pass 'greedy' changed .*'more'.*report it"):
        run_passes(gs.import_onnx(model), [greedy])


def test_a_stage_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="'late'; expected one of canonicalise, fuse"):
        Pass("p", "late", "nothing", lambda graph: PassResult(False))


@pytest.mark.parametrize(
    ("stages", "changes", "reason"),
    [
        (("canonicalise",), ("64", "16"), r"rsqrt_to_div.*Mul 'n/unit'.*narrower than 64"),
        (("stream",), ("", ""), r"stateful_causal_conv.*no causal node tells the axis"),
    ],
)
def test_a_rewrite_says_why_it_did_not_fire(
    stages: tuple[str, ...],
    changes: tuple[str, str],
    reason: str,
    model: onnx.ModelProto,
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = onnx.printer.to_text(model).replace(*changes) if changes[0] else None
    narrow = model if text is None else parser.parse_model(text)
    with caplog.at_level(logging.DEBUG, "linexport"):
        passes.run(narrow, stages)
    lines = [f"{r.name}: {r.getMessage()}" for r in caplog.records]
    assert any(re.search(reason, line) for line in lines), lines
