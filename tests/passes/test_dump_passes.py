"""``convert --dump-passes`` and ``--stop-after``: graphs and differences, and no artifact."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

pytestmark = pytest.mark.usefixtures("one_thread")

Cli = Callable[..., Any]


def test_a_conversion_stops_after_a_pass(
    cli: Cli, factories: SimpleNamespace, tmp_path: Path
) -> None:
    output, dump = tmp_path / "artifact", tmp_path / "dump"
    convert = ("convert", factories.source("masked"), "-o", output, "--dump-passes", dump)
    result = cli(*convert, "--stop-after", "expose_past_present")
    assert result.code == 0, result.err
    assert "Stopped after the pass expose_past_present" in result.out
    assert str(dump / "result.onnx") in result.out
    assert not output.exists()
    graph = onnx.load(dump / "result.onnx", load_external_data=False).graph
    assert "past_state_0" in {i.name for i in graph.input}
    [diff] = dump.glob("*_expose_past_present.diff")
    assert "inputs added (1)\n+ past_state_0 float[" in diff.read_text()
    result = cli(*convert[:-1], tmp_path / "other", "--stop-after", "simplify", "--json")
    assert result.code == 0
    assert json.loads(result.out)["status"] == "stopped"


def test_a_dump_does_not_change_the_artifact_whose_manifest_lists_the_passes(
    cli: Cli, factories: SimpleNamespace, tmp_path: Path
) -> None:
    convert = ("convert", factories.source("masked"), "--no-bench", "--json", "-o")
    plain = cli(*convert, tmp_path / "plain")
    dumped = cli(*convert, tmp_path / "dumped", "--dump-passes", tmp_path / "dump")
    assert plain.code == dumped.code == 0
    one, other = json.loads(plain.out), json.loads(dumped.out)
    assert one["model_sha256"] == other["model_sha256"]
    changed = [p["name"] for p in other["passes"] if p["changed"]]
    assert changed and changed == [
        path.stem.partition("_")[2] for path in sorted((tmp_path / "dump").glob("*.diff"))
    ]
    assert other["passes"][-1]["nodes_after"] == other["nodes"]["artifact"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--stop-after", "nonsense", "--dump-passes", "d"), "Unknown pass 'nonsense'; expected"),
        (("--stop-after", "simplify"), "Add --dump-passes DIR"),
        (("--dump-passes", "."), "is not empty"),
    ],
)
def test_what_cannot_be_dumped_is_refused_before_loading(
    options: tuple[str, ...],
    message: str,
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "something").touch()
    result = cli("convert", "absent.onnx", "-o", "artifact", *options)
    assert result.code == 2
    assert message in result.err
