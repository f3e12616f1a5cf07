"""The README's commands and code do what it says: they are run, in order, in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ELSEWHERE = ("tools/", "pip install")
"""Commands that other tests, or the set-up itself, run."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("readme")


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    bin_folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    return subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True
    )


def test_commands_then_code(folder: Path) -> None:
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.strip()]
    ours = [c for c in commands if not c.startswith(ELSEWHERE)]
    assert len(ours) >= 8
    for command in ours:
        done = run(command, folder)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    code = "\n".join(blocks("python"))
    done = run(f"{sys.executable} -c '{code}'", folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_quickstart_ends_by_naming_the_report() -> None:
    done = run(str(ROOT / "tools" / "quickstart"), ROOT)
    assert done.returncode == 0, done.stderr
    assert "quickstart/artifact/report.html" in done.stdout.splitlines()[-1]
    assert (ROOT / "quickstart" / "artifact" / "report.html").is_file()
