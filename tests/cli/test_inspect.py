"""``inspect``: what it says of attention that was found and that was not, and what it draws."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import linexport
from linexport.errors import UsageError
from linexport.inspection import inspect
from linexport.inspection.subgraph import around
from linexport.manifest.inspected import GraphPart, SourceInspection
from linexport.models.torch_ops import call
from linexport.plugins.ops import causal_conv, registry
from linexport.report import render_findings
from linexport.report.layers import place

pytestmark = pytest.mark.usefixtures("one_thread")


class Both(nn.Module):
    """Softmax attention, then linear attention with a normaliser in the last column."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.qkv(x).reshape(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4).unbind()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x)
        weights = (q @ k.transpose(-1, -2) / 8**0.5).softmax(-1)
        q, k, v = self.heads((weights @ v).transpose(1, 2).flatten(2))
        q, k, v = q.relu(), k.relu(), nn.functional.pad(v, (0, 1), value=1.0)
        y = q @ (k.transpose(-1, -2) @ v)
        return (y[..., :-1] / (y[..., -1:] + 1e-15)).transpose(1, 2).flatten(2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("both") / "both.pt2"
    sizes = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(Both().eval(), (torch.randn(2, 12, 16),), dynamic_shapes=sizes)
    torch.export.save(program, path)
    return path


@pytest.fixture(scope="module")
def inspected(source: Path) -> SourceInspection:
    found = inspect(source, drawings=True)
    assert isinstance(found, SourceInspection)
    return found


@pytest.fixture(scope="module")
def found(inspected: SourceInspection) -> dict[str, Any]:
    return inspected.to_json()


def test_a_match_says_what_it_is(found: dict[str, Any]) -> None:
    (match,) = found["matches"]
    expected = {"causal": False, "normalize": True, "update_rule": "linear", "d_k": 8, "d_v": 8}
    expected |= {"q_num_heads": 2, "kv_num_heads": 2, "masked": False}
    assert {k: match[k] for k in expected} == expected
    assert match["eps"] == pytest.approx(1e-15)
    assert match["query_map"] == match["key_map"] == "relu"
    assert 0 <= match["proof"]["max_relative_error"] < 1e-4 and len(match["proof"]["sizes"]) >= 2
    assert found["nodes"]["rewritten"] < found["nodes"]["traced"]
    assert found["token_flow"] is None  # it has no states


def test_a_near_miss_says_why(found: dict[str, Any]) -> None:
    (miss,) = found["unmatched"]
    assert "softmax" in miss["reason"]


def test_the_graph_around_a_match_has_its_operators(found: dict[str, Any]) -> None:
    (match,) = found["matches"]
    before = [n["op"] for n in match["before"]["nodes"] if n["role"] == "inside"]
    after = [n["op"] for n in match["after"]["nodes"] if n["role"] == "inside"]
    assert {"Relu", "Pad", "MatMul", "Div"} <= set(before) and "LinearAttention" not in before
    assert {"FeatureMap", "LinearAttention"} <= set(after)
    assert not {"Constant", "Shape"} & {n["op"] for n in match["before"]["nodes"]}
    notes = {n["note"] for n in match["before"]["nodes"] if n["op"] == "Add"}
    assert notes == {"1e-15"}
    miss = found["unmatched"][0]["before"]
    assert "Softmax" in [n["op"] for n in miss["nodes"]]


def test_edges_join_nodes_that_are_there(found: dict[str, Any]) -> None:
    for part in (found["matches"][0]["before"], found["matches"][0]["after"]):
        known = {n["id"] for n in part["nodes"]}
        assert {end for edge in part["edges"] for end in edge} <= known
        assert len({n["id"] for n in part["nodes"]}) == len(part["nodes"])


def test_the_page_is_whole_and_loads_nothing(inspected: SourceInspection) -> None:
    page = render_findings(inspected)
    assert "1 linear attention fused, 1 left as it was." in page
    assert not re.search(r"(src|href)=\"(?!data:|#)", page) and "<script" not in page
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(drawings) == 3
    for svg in drawings:
        ElementTree.fromstring(svg)
    assert page.count("<section>") == page.count("</section>") == 2


def test_names_from_a_model_are_text(inspected: SourceInspection) -> None:
    (one,) = inspected.matches
    assert one.before is not None
    part = GraphPart(tuple(replace(n, op="<b>") for n in one.before.nodes), ())
    named = replace(one, match=replace(one.match, where="<i>"), before=part)
    page = render_findings(replace(inspected, matches=(named,)))
    assert "<b>" not in page.split("<main>")[1] and "<i>" not in page


def test_the_command_prints_and_writes(
    cli: Callable[..., Any], source: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    result = cli("inspect", source, "--html", page)
    assert result.code == 0
    for text in ("bidirectional linear attention", "Feature map: relu", "left as it is", "softmax"):
        assert text in result.out
    assert page.read_text().startswith("<!doctype html>")
    answer = cli("inspect", source, "--json").json()
    assert len(answer["matches"]) == 1 and "before" not in answer["matches"][0]
    assert "softmax" in answer["unmatched"][0]["reason"]
    assert cli("inspect", source, "--html", tmp_path / "no" / "page.html").code == 2


def test_an_artifact_has_a_report_already(
    cli: Callable[..., Any], artifact: Path, tmp_path: Path
) -> None:
    result = cli("inspect", artifact, "--html", tmp_path / "page.html")
    assert result.code == 2 and "report.html" in result.err


def test_a_node_whose_package_is_gone_is_named(
    cli: Callable[..., Any], artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cli("inspect", artifact, "--json").json()["ops"]
    kept = {name: op for name, op in registry.all_ops().items() if name != "LinearAttention"}
    monkeypatch.setattr(registry, "all_ops", lambda: kept)
    after = cli("inspect", artifact, "--json").json()["ops"]
    assert [(op["node"], op["op"]) for op in after] == [(op["node"], op["op"]) for op in before]
    gone = [op for op in after if op["op"] == "LinearAttention"]
    assert gone and all("not installed" in op["details"] for op in gone)
    assert "of a package that is not" in " ".join(cli("inspect", artifact).out.split())


def test_what_mixes_tokens_is_said(cli: Callable[..., Any], factories: SimpleNamespace) -> None:
    result = cli("inspect", factories.source("averaging"))
    assert "Does not stream: ReduceMean" in result.out


class Conv(nn.Module):
    """A state that is not that of linear attention."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.ones(4, 1, 3)
        output: torch.Tensor = call(causal_conv.OP, x, weight, None, None, "none")[0]
        return output


def test_a_model_streams_by_the_state_of_any_op(tmp_path: Path) -> None:
    path = tmp_path / "conv.pt2"
    sizes = ({0: torch.export.Dim.DYNAMIC, 2: torch.export.Dim.DYNAMIC},)
    torch.export.save(
        torch.export.export(Conv(), (torch.randn(2, 4, 9),), dynamic_shapes=sizes), path
    )
    found = inspect(path, drawings=True)
    assert isinstance(found, SourceInspection)
    assert [state.op for state in found.states] == ["CausalConvWithState"]
    assert "nothing prevents it" in render_findings(found)
    assert "the model has no state" in render_findings(replace(found, states=()))


def test_a_part_of_nothing_is_empty(source: Path) -> None:
    from linexport.sources import load_model
    from linexport.trace import trace

    model = trace(load_model(source)).model
    assert around(model, ()) == GraphPart((), ())


# Layout


def test_nodes_lie_below_what_they_depend_on_and_apart() -> None:
    widths = dict.fromkeys("abcdefg", 80.0)
    edges = [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("a", "d"), ("e", "d"), ("d", "f")]
    placed = place(widths, edges)
    assert all(placed.layer[end] > placed.layer[start] for start, end in edges)
    assert placed.layer["e"] == placed.layer["d"] - 1
    for one in widths:
        for other in widths:
            if one < other and placed.layer[one] == placed.layer[other]:
                assert abs(placed.x[one] - placed.x[other]) >= 80
    assert len(placed.bends["a", "d"]) == 1
    assert all(40 <= x <= placed.width - 40 for x in placed.x.values())


def test_a_circle_is_drawn_without_the_edge_that_closes_it() -> None:
    placed = place({"a": 50, "b": 50}, [("a", "b"), ("b", "a")])
    assert placed.layer == {"a": 0, "b": 1}


def test_objects_are_inspected_as_they_are_converted() -> None:
    module, x = Both().eval(), torch.randn(2, 12, 16)
    for found in (linexport.inspect(module, (x,)), linexport.inspect((module, (), {"x": x}))):
        assert isinstance(found, SourceInspection)
        assert len(found.matches) == 1 and found.source.kind == "object"
        assert re.fullmatch(
            r"<SourceInspection of \S+\.Both: 1 fused, 1 left, 0 states>", repr(found)
        )
    with pytest.raises(UsageError, match=r"has no example inputs\. Give them: args="):
        linexport.inspect(module)
    with pytest.raises(UsageError, match="Found an object of the type list"):
        linexport.inspect([module])
