"""An output that is the source, or holds it, is refused: the result would take its place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from linexport.models import build, checkpoint
from linexport.package.folder import RECORD
from tests.support.command_line import Result

pytestmark = pytest.mark.usefixtures("one_thread")

TAKEN = "and the new one would take its place. Choose another output."


@pytest.fixture
def place(converted: Callable[..., Path], tmp_path: Path) -> Path:
    """``artifact``, ``linked`` to it, and a packaged folder with an artifact in it."""
    shutil.copytree(converted("small"), tmp_path / "artifact")
    (tmp_path / "linked").symlink_to("artifact")
    shutil.copytree(converted("small"), tmp_path / "packaged" / "inner")
    (tmp_path / "packaged" / RECORD).write_text(json.dumps({}))
    config = {"num_heads": 2, "head_dim": 16}
    checkpoint.save(build("linear_attention_layer", config), tmp_path / "layer.pt")
    shutil.copy(tmp_path / "layer.pt", tmp_path / "artifact")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("quantize artifact -o artifact --overwrite", "artifact is the source itself"),
        ("quantize linked -o artifact --overwrite", "artifact is the source itself"),
        ("quantize artifact -o ./artifact", "artifact is the source itself"),
        (
            "convert artifact/model.onnx -o artifact --overwrite",
            "artifact is where the source artifact/model.onnx is",
        ),
        (
            "convert artifact/layer.pt -o artifact --overwrite --weights int8",
            "artifact is where the source artifact/layer.pt is",
        ),
        (
            "package packaged/inner --for onnx -o packaged --overwrite",
            "packaged is where the source packaged/inner is",
        ),
        (
            "linearize layer.pt -o layer.pt --data none --overwrite",
            "layer.pt is the source itself",
        ),
        (
            "linearize layer.pt -o other.pt --data none --html layer.pt",
            "layer.pt is the source itself",
        ),
        ("inspect layer.pt --html ./layer.pt", "layer.pt is the source itself"),
    ],
)
def test_a_source_is_not_replaced_by_what_is_made_of_it(
    command: str,
    said: str,
    place: Path,
    cli: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    before = {p: p.read_bytes() for p in place.rglob("*") if p.is_file()}
    result = cli(*command.split())
    assert result.code == 2
    assert f"{said}, {TAKEN}" in " ".join(result.err.split())
    assert {p: p.read_bytes() for p in place.rglob("*") if p.is_file()} == before
