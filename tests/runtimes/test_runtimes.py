"""Portable artifacts in the runtimes that people have: docs/evidence/runtimes.md is true."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runtimes.matrix import Subject, subjects, tried
from tests.runtimes.runtimes import RUNTIMES, need_node
from tests.support import ROOT

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]

LIMIT = 1e-5
RECORDED = json.loads((ROOT / "docs" / "data" / "runtimes.json").read_text())["result"]


@pytest.fixture(scope="module")
def all_subjects(tmp_path_factory: pytest.TempPathFactory) -> list[Subject]:
    return list(subjects(tmp_path_factory.mktemp("subjects")))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_equals_the_original_or_is_refused_as_the_table_says(
    runtime: str, environment: Path, all_subjects: list[Subject], tmp_path: Path
) -> None:
    """No runtime gives something else; all take what is packaged for them."""
    if runtime.startswith("onnxruntime-"):
        need_node(environment)
    found = tried(runtime, environment, all_subjects, tmp_path)
    assert all(t.error < LIMIT for t in found if t.error is not None), found
    assert all(t.error is not None for t in found if t.form == "packaged"), found
    recorded = {(r["model"], r["form"]): r["error"] for r in RECORDED if r["runtime"] == runtime}
    refused = {place for place, error in recorded.items() if error is None}
    assert {(t.model, t.form) for t in found if t.error is None} == refused, found
