"""What onnxruntime-genai cannot run is refused, by its reason and without the library."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from linexport.artifact.genai import write_genai
from linexport.errors import ParityError, UsageError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def language_model(converted: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of an artifact, to change."""
    return Path(shutil.copytree(converted("language_model"), tmp_path / "artifact"))


def change(artifact: Path, **entries: Any) -> None:
    path = artifact / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def test_an_artifact_that_failed_its_check(language_model: Path, tmp_path: Path) -> None:
    change(language_model, status="parity_failed")
    with pytest.raises(ParityError, match="failed its parity check"):
        write_genai(language_model, tmp_path / "genai")


def test_an_artifact_in_the_place_of_the_folder(language_model: Path) -> None:
    with pytest.raises(UsageError, match="is an artifact; expected a new or empty folder"):
        write_genai(language_model, language_model)


def test_a_folder_with_something_in_it(language_model: Path, tmp_path: Path) -> None:
    place = tmp_path / "full"
    place.mkdir()
    (place / "note.txt").write_text("mine")
    with pytest.raises(UsageError, match="full"):
        write_genai(language_model, place)
    assert (place / "note.txt").read_text() == "mine"


def test_an_artifact_without_states(
    converted: Callable[..., Path], cli: Any, tmp_path: Path
) -> None:
    result = cli("package", converted("averaging"), "--for", "genai", "-o", tmp_path / "genai")
    assert result.code == 2 and not (tmp_path / "genai").exists()
    assert "does not stream" in " ".join(result.err.split())
