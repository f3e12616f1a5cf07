"""Processes of linexport's own import nothing of the folder in which they are started."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import linexport
import linexport.plugins
from linexport.system.child_process import python_module


def test_a_module_in_the_current_directory_is_not_imported(tmp_path: Path) -> None:
    """An artifact's folder may be the current one: its ``json.py`` is not Python's."""
    (tmp_path / "json.py").write_text(
        "import pathlib\npathlib.Path('ran').touch()\nraise SystemExit"
    )
    command = python_module("linexport.artifact.text.template_process")
    lines = '{"template": "{{ messages }}", "words": {}}\n["hello"]\n'
    done = subprocess.run(command, cwd=tmp_path, input=lines, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ('{"prompt": "[\'hello\']"}\n', 0)
    assert not (tmp_path / "ran").exists()


def test_modules_are_started_in_no_other_way() -> None:
    """``-P`` or, of a process that is forked, the path of its parent."""
    folders = [Path(p) for p in (*linexport.__path__, *linexport.plugins.__path__)]
    sources = {p: p.read_text() for folder in folders for p in folder.rglob("*.py")}
    started = {
        p.name for p, text in sources.items() if re.search(r"sys\.executable, (?!\"-P\")", text)
    }
    assert sources and started == set()
