"""Prefill and decode at depths, in every form they are printed in."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from linexport.manifest import read
from linexport.timing import throughput, throughput_table

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.services
def test_prefill_and_decode_at_depths(
    artifact: Path,
    factories: SimpleNamespace,
    cli: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fed: list[tuple[int, float]] = []
    stateful = throughput._stateful

    def watched(bench: Any, *arguments: Any) -> Any:
        session = bench.opened()
        if not fed:
            fed.append((0, 0.0))
            monkeypatch.setattr(session, "run", noting(session.run))
        return stateful(bench, *arguments)

    def noting(run: Any) -> Any:
        def note(feeds: Any) -> Any:
            fed.append((feeds["x"].shape[1], float(np.abs(feeds["past_state_0"]).sum())))
            return run(feeds)

        return note

    monkeypatch.setattr(throughput, "_stateful", watched)
    monkeypatch.setattr(throughput, "CHUNK", 4)
    plot = tmp_path / "plot.svg"
    done = cli(
        "bench", artifact, "--source", factories.source("small"), "--threads", 1, "-p", "7",
        "-n", "3", "-d", "0,10", "-r", 2, "--format", "json", "--plot", plot,
    )  # fmt: skip
    assert done.code == 0, done.err
    rows = json.loads(done.out)["rows"]
    tests = [r["test"] for r in rows if r["runner"] == "artifact"]
    assert tests == ["pp7", "tg3", "pp7 @ d10", "tg3 @ d10"]
    for row in rows:
        assert row["tokens_per_second"] > 0 and row["deviation"] >= 0, row["reason"]
    assert "<svg" in plot.read_text()
    at_depth = [length for length, _ in fed]
    assert at_depth[at_depth.index(4) :][:4] == [4, 4, 2, 7]  # the way to depth 10, in pieces
    prompts = [state for length, state in fed if length == 7]
    assert prompts[0] == 0 and prompts[-1] > 0  # the second begins from the state at its depth
    manifest = read(artifact)
    assert manifest.throughput is not None and len(manifest.throughput) == len(rows)
    lines = throughput_table.markdown(manifest.throughput).splitlines()
    assert lines[2].startswith("| pp7 | artifact | ")
    assert {line.count("|") for line in lines[:14]} == {6}
    assert "time between tokens, tg3: artifact" in lines[-1]
    found = list(csv.DictReader(io.StringIO(throughput_table.csv(manifest.throughput))))
    assert [r["test"] for r in found] == [r["test"] for r in rows]


def test_what_cannot_be_measured_is_refused(
    artifact: Path, factories: SimpleNamespace, cli: Callable[..., Any], tmp_path: Path
) -> None:
    source = ("--source", factories.source("small"), "--threads", 1)
    for arguments, message in (
        (("--format", "xml"), "expected md, json or csv"),
        (("-p", "0"), "expected integers of at least 1"),
        (("-d", "-1"), "expected integers of at least 0"),
    ):
        done = cli("bench", artifact, *source, *arguments)
        assert done.code == 2 and message in done.err
