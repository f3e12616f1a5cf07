"""A disk that fills up while weights are written."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from linexport.graph import external_data
from tests.support.command_line import Result

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("full", ["temporary files", "the artifact"])
def test_a_full_disk_is_one_sentence_and_leaves_the_earlier_artifact(
    full: str,
    cli: Callable[..., Result],
    exact: Path,
    quantised: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files below one folder cannot be written, as where its disk is full."""
    place = shutil.copytree(quantised("int8"), tmp_path / "out" / "q")
    before = {p.name: p.read_bytes() for p in place.iterdir()}
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    there = tmp_path / ("tmp" if full == "temporary files" else "out")
    save = external_data.save

    def no_room(model: onnx.ModelProto, weights: Any, path: Path, data: Path | None = None) -> None:
        save(model, weights, path, data)
        if there in path.parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(external_data, "save", no_room)
    result = cli("quantize", exact, "-o", place, "--weights", "int4", "--overwrite")
    assert result.code == 5
    found = " ".join(result.err.split())
    assert f"Cannot write {full} to {there}" in found and "No space left on device" in found
    assert {p.name: p.read_bytes() for p in place.iterdir()} == before
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["q"]
    assert not list((tmp_path / "tmp").iterdir())
