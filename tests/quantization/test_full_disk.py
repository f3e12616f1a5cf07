"""A disk that fills up while weights are written."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest

from linexport.artifact import temporary, write
from linexport.graph import external_data
from linexport.manifest import DATA
from tests.support.command_line import Result

pytestmark = pytest.mark.usefixtures("one_thread")

LEFT = 16_384
"""Bytes that are free on the full disk: less than any file of weights."""


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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 4 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place))
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here: that takes root")
    try:
        yield place
    finally:
        subprocess.run(("umount", "--lazy", str(place)), check=True)


@pytest.mark.parametrize("full", ["temporary files", "the artifact"])
def test_external_data_on_a_disk_that_is_really_full(
    full: str,
    cli: Callable[..., Result],
    exact: Path,
    quantised: Callable[[str], Path],
    small_disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All weights go to files of their own, of which the one that is written does not fit."""
    monkeypatch.setattr(write, "EXTERNAL_ABOVE", 1)
    monkeypatch.setattr(temporary, "MAPPED_ABOVE", 1)
    (tmp_path / "roomy").mkdir()
    scratch, out = tmp_path / "roomy", small_disk
    if full == "temporary files":
        scratch, out = out, scratch
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    place = shutil.copytree(quantised("int8"), out / "q")
    command = ("quantize", exact, "-o", place, "--weights", "int4", "--overwrite", "--threads", "1")
    assert cli(*command).code == 0 and (place / DATA).stat().st_size > 2 * LEFT
    before = {p.name: p.read_bytes() for p in place.iterdir()}

    filler = small_disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - LEFT))
    result = cli(*command)
    assert result.code == 5
    found = " ".join(result.err.split())
    assert f"Cannot write {full} to {small_disk}" in found
    assert "No space left on device" in found and "Make room there" in found
    assert {p.name: p.read_bytes() for p in place.iterdir()} == before
    filler.unlink()
    assert {p.name for p in (*out.iterdir(), *scratch.iterdir())} == {"q"}
    assert cli(*command).code == 0
