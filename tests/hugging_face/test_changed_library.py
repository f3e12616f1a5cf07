"""Copies of transformers whose parameters, functions and modules have other names still convert."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.changed_library import (
    FUNCTIONS,
    moved,
    renamed,
    rewritten,
    with_other_classes,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

TYPES = {
    renamed: (
        "qwen3_5_text",
        "mamba",
        "minimax",
        "lfm3",
        "zaya",
        "inkling2_text",
        "nemotron_h_omni",
    ),
    moved: ("qwen3_5_text", "mamba2", "jamba", "lfm2_moe", "kimi_linear"),
    with_other_classes: ("minimax", "rwkv", "zaya", "qwen4_exp_text"),
}
"""Types with each kind of patch, by what was changed."""

CONVERT = """
import sys
from pathlib import Path
import linexport
from tests.support.families import TINY, save_model
save_model(TINY["lfm2"], "lfm2", Path(sys.argv[1], "model"))
manifest = linexport.convert(sys.argv[1] + "/model", sys.argv[1] + "/out", bench=False, threads=1)
print(manifest.status, manifest.streaming.passed, *manifest.warnings, sep="\\n")
"""


def run(folder: Path, *command: str) -> str:
    """Return what a command prints with the copy of transformers in a folder."""
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("change", TYPES)
def test_what_has_other_names_converts_and_streams(
    change: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    types = TYPES[change]
    said = run(change("transformers", tmp_path), "tools/check_versions.py", "--quick", *types)
    assert said.splitlines()[1:] == [f"{name}: streams" for name in types]


def test_what_is_written_anew_converts_by_its_structure(tmp_path: Path) -> None:
    """A convolution of another name and with other parameters is none that a patch knows."""
    folder = rewritten("transformers", tmp_path)
    status, streams, *warnings = run(folder, "-c", CONVERT, str(tmp_path)).splitlines()
    assert status == "ok" and streams in ("True", "None")
    assert any("convolution of layer 0" in w and "transformers 5" in w for w in warnings)


def test_names_that_are_changed_are_those_of_this_transformers() -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5

    assert {name for name in FUNCTIONS if hasattr(modeling_qwen3_5, name)}
