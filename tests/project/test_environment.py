"""``tools/environment`` installs what is missing, and nothing again."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT

PYTHON = """#!/usr/bin/env bash
echo "$@" >> calls
case "$*" in *tomllib*) echo numpy ;; esac
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose Python writes down what it is called with."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "environment", tmp_path / "tools")
    for name in ("constraints.txt", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    for kind in ("cpu", "cuda", "kernels"):
        folder = tmp_path / "plugins" / kind / "cpp"
        folder.mkdir(parents=True)
        (folder / "operators.cc").touch()
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def installed(project: Path, extras: str) -> list[str]:
    """Return what was called to have these extras."""
    (project / "calls").unlink(missing_ok=True)
    command = ["bash", "-euc", f'. tools/environment "{extras}"']
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    calls = (project / "calls").read_text().splitlines()
    return [call for call in calls if "install" in call]


def test_an_extra_is_added_without_compiling_again(project: Path) -> None:
    first = installed(project, "")
    assert sum("--editable ." in call for call in first) == 1
    assert any(" torch==" in call for call in first)
    (added,) = installed(project, "hf")
    assert added.endswith("[hf]")
    assert installed(project, "hf") == installed(project, "") == []
    (more,) = installed(project, "serve")
    assert more.endswith("[hf,serve]")


def test_changed_sources_are_compiled_again(project: Path) -> None:
    installed(project, "hf")
    (project / "plugins" / "cpu" / "cpp" / "operators.cc").write_text("int x;")
    again = installed(project, "hf")
    assert sum("--editable ." in call for call in again) == 1
