"""Every command and every piece of code in README.md and docs/ does what the page says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pages import blocks, pages

from tests.support import ROOT

BLOCKS = {
    str(path.relative_to(ROOT)): blocks.tested_blocks(path.read_text(encoding="utf-8"))
    for path in pages()
}
FAST = [name for name, found in BLOCKS.items() if any(not b.slow for b in found)]
SLOW = [name for name, found in BLOCKS.items() if any(b.slow for b in found)]
SETUP = ("tools/", "pip install")
"""Commands that set the project up: that the tests run at all shows that they work."""


@pytest.mark.services
@pytest.mark.parametrize("name", FAST)
def test_page(
    name: str,
    provide: Callable[[str, Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _run([b for b in BLOCKS[name] if not b.slow], name, provide, tmp_path, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_whole_page(
    name: str,
    provide: Callable[[str, Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _run(BLOCKS[name], name, provide, tmp_path, monkeypatch, capsys)


def _run(
    found: list[blocks.Block],
    name: str,
    provide: Callable[[str, Path], None],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Run the blocks of a page in order, in one folder; Python blocks share their names."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in found:
        where = f"{name}, line {block.line}"
        for given in block.given:
            provide(given, folder)
        if block.file:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text)
            continue
        capsys.readouterr()
        if block.language == "python":
            exec(compile(block.text, where, "exec"), names)
            output = capsys.readouterr().out
        else:
            output = _shell(block, where, folder)
        missing = blocks.missing_line(block.output, output)
        assert missing is None, f"{where}: not in the output: {missing}\n{output}"


def _shell(block: blocks.Block, where: str, folder: Path) -> str:
    """Run the commands of a block; return what they print."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment["PYTHONPATH"] = str(folder)
    printed = ""
    lines = [c for c in blocks.commands(block.text) if not c.startswith(SETUP)]
    for command in lines:
        done = subprocess.run(
            command, shell=True, cwd=folder, env=environment, capture_output=True, text=True
        )
        expected = block.exit_code if command is lines[-1] else 0
        printed += done.stdout + done.stderr
        assert done.returncode == expected, f"{where}: {command}\n{printed}"
    return printed


@pytest.mark.slow
def test_quickstart_ends_by_naming_the_report() -> None:
    done = subprocess.run(
        [str(ROOT / "tools" / "quickstart")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "quickstart/artifact/report.html" in done.stdout.splitlines()[-1]
    assert (ROOT / "quickstart" / "artifact" / "report.html").is_file()
