"""What type checkers say of a program that uses the API: this file is checked with the package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import linexport
from linexport.errors import UsageError


def test_a_target_that_there_is_not_is_refused_before_it_runs(tmp_path: Path) -> None:
    """mypy fails where one of these lines has no error of the kind that is ignored."""
    with pytest.raises(UsageError, match="onxx"):
        linexport.convert("a.pt", tmp_path / "a", target="onxx")  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        linexport.convert("a.pt", tmp_path / "a", weights="int5")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        linexport.convert("a.pt", tmp_path / "a", typo=1)  # type: ignore[call-arg]


def typed(folder: Path) -> np.ndarray:
    """Return what an artifact computes; never called: its types are what is tested."""
    manifest = linexport.convert("a.pt", folder, target="ort", weights="int4", lengths=[1, 64])
    artifact: linexport.Artifact = manifest.load()
    with artifact.stream() as stream:
        outputs: dict[str, np.ndarray] = stream.step(np.zeros((1, 1, 8), np.float32))
    return outputs[artifact.manifest.outputs[0].name]
