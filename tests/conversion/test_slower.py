"""What is said of an artifact that is slower than a plain export, measured or counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import linexport
from linexport.conversion.slower import SAID, with_slowness_measured
from linexport.manifest import Manifest
from linexport.manifest.measured import LatencyRow
from linexport.timing.work import Work, counted, work_of

pytestmark = pytest.mark.usefixtures("one_thread")


def sums(path: Path, shape: list[str | int], *axes: int) -> Path:
    """A file of cumulative sums along axes, one after another."""
    names = ["x", *(f"s{n}" for n in range(1, len(axes))), "y"]
    nodes = [
        helper.make_node("CumSum", [names[n], f"a{n}"], [names[n + 1]], f"sum_{n}")
        for n in range(len(axes))
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "g",
        [value("x", 1, shape)],
        [value("y", 1, shape)],
        [numpy_helper.from_array(np.array(axis), f"a{n}") for n, axis in enumerate(axes)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("shape", "axes", "state"),
    [
        (["B", "T", 64], (1,), ("B", 64)),
        (["B", 6, "T", 8], (2,), ("B", 6, 8)),
        (["B", "T", 5, 4], (1, 2), ("B", 5, 4)),
        (["B", "H", "W", 4], (1, 2), None),
    ],
    ids=["channels", "heads", "two axes, one of tokens", "two axes of any size"],
)
def test_sums_that_nothing_multiplies_stay_sums(
    tmp_path: Path, shape: list[str | int], axes: tuple[int, ...], state: tuple[object, ...] | None
) -> None:
    """They were products of matrices: 5, 113 and 43 to 238 times as slow as the file."""
    source = sums(tmp_path / "sums.onnx", shape, *axes)
    manifest = linexport.convert(source, tmp_path / "artifact", bench=False, threads=1)
    assert manifest.status == "ok"
    assert [s.shape for s in manifest.states] == ([state] if state else [])
    assert manifest.streaming.passed is (True if state else None)
    sizes = {"B": 1, "T": 3000, "H": 70, "W": 50}
    x = np.ones([sizes.get(str(n), n) for n in shape], np.float32)
    pasts = {s.past: np.zeros([1, *s.shape[1:]], np.float32) for s in manifest.states}
    plain = work_of(source, {"x": x})
    ours = work_of(tmp_path / "artifact/model.onnx", {"x": x, **pasts})
    assert ours.products == 0
    assert ours.bytes <= 1.1 * plain.bytes
    assert not any(warning.startswith(SAID) for warning in manifest.warnings)


def test_more_work_than_the_graph_it_came_from_is_said_unmeasured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sums(tmp_path / "sums.onnx", ["B", "T", 64], 1)
    counts = iter([Work(bytes=10**6), Work(bytes=10**7)])
    monkeypatch.setattr("linexport.conversion.slower.work_of", lambda *_: next(counts))
    manifest = linexport.convert(source, tmp_path / "artifact", bench=False, threads=1)
    [said] = [warning for warning in manifest.warnings if warning.startswith(SAID)]
    assert "about 8.6 times as long at 1,024 tokens, for the states by which it streams" in said
    assert said in (tmp_path / "artifact/report.html").read_text()
    stored = json.loads((tmp_path / "artifact/manifest.json").read_text())
    assert said in stored["warnings"]


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    source = sums(tmp_path / "sums.onnx", ["B", "H", "W", 4], 1, 2)
    return linexport.convert(source, tmp_path / "artifact", bench=False, threads=1)


def row(length: int, ours: float | None, plain: float | None, batch: int = 1) -> LatencyRow:
    times = {"artifact": ours, "plain_export": plain, "pytorch": None}
    named = {f"{name}_{kind}": ms for name, ms in times.items() for kind in ("ms", "p90_ms")}
    return LatencyRow(length=length, batch=batch, reasons={}, **named)


def test_every_measured_length_at_which_it_is_slower_is_named(manifest: Manifest) -> None:
    rows = (row(64, 2.0, 1.0), row(256, 1.04, 1.0), row(1024, 3.0, 2.0, 8), row(4096, 1.0, None))
    measured = with_slowness_measured(replace(manifest, latency=rows))
    [said] = [warning for warning in measured.warnings if warning.startswith(SAID)]
    assert said == (
        f"{SAID}it takes 2 times as long at 64 tokens, 1.5 times as long at 1,024 tokens in "
        "batches of 8."
    )
    again = with_slowness_measured(replace(measured, latency=(row(64, 1.0, 1.0),)))
    assert again.warnings == manifest.warnings


def event(op: str, given: list[object], made: list[object], name: str = "n") -> dict[str, object]:
    shapes = {"input_type_shape": given, "output_type_shape": made}
    return {"cat": "Node", "name": f"{name}_kernel_time", "args": {"op_name": op, **shapes}}


def test_bytes_and_products_are_those_of_what_was_run() -> None:
    x, w = {"float": [2, 3, 4]}, {"float": [2, 4, 5]}
    events = [
        event("MatMul", [x, w], [{"float": [2, 3, 5]}]),
        event("MatMul", [x], [{"float": [2, 3, 5]}]),
        event("FusedMatMul", [{"float": [4, 6]}], [{"float": [6, 5]}]),  # transposed
        event("Gemm", [{"float": [6, 4]}], [{"float": [6, 5]}]),
        event("Add", [{"float16": [8]}, {"float16": [1]}], [{"float16": [8]}]),
        event("Reshape", [x, {"int64": [2]}], [{"float": [6, 4]}]),
        event("If", [{"bool": []}], [x]),
        {"cat": "Session", "name": "model_run", "args": {}},
        {"cat": "Node", "name": "n_fence_before", "args": {"op_name": "Add"}},
    ]
    work = counted(events)
    assert (work.nodes, work.calls) == (6, 2 + 1 + 1 + 1)
    assert work.products == 2 * 3 * 4 * 5 + 3 * (6 * 4 * 5)
    floats = (24 + 40 + 30) + 3 * (24 + 30)
    assert work.bytes == 4 * floats + 2 * 17


def test_counts_of_a_scan_are_those_of_all_its_steps() -> None:
    text = """
    <ir_version: 9, opset_import: ["": 18]>
    g (float[T, 4] x) => (float[T, 4] y) <float[4] start = {0, 0, 0, 0}>
    {
        last, y = Scan <num_scan_inputs = 1, body = b (float[4] h, float[4] one)
            => (float[4] next, float[4] out) { next = Mul (h, one) out = Exp (next) }> (start, x)
    }
    """
    model = onnx.parser.parse_model(text).SerializeToString()
    few, many = (work_of(model, {"x": np.ones((n, 4), np.float32)}) for n in (10, 30))
    assert many.nodes - few.nodes == 2 * 20 and many.bytes - few.bytes == 20 * (3 + 2) * 16
