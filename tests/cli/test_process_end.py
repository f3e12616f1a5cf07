"""The program ends with its last line, its exit code, and nothing left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import os, sys, tempfile

class Slow:
    def __del__(self, write=os.write):
        write(1, b"freed")

kept = Slow()
from linexport.__main__ import main
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"{BEGIN}{code}", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_objects_that_are_alive_at_the_end_are_not_freed() -> None:
    done = run("main()", "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("linexport") and "freed" not in done.stdout


def test_they_are_freed_where_the_program_does_not_end_by_itself() -> None:
    done = run("import linexport.cli\nlinexport.cli.main = lambda: 1 / 0\nmain()")
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
    assert "freed" in done.stdout


@pytest.mark.parametrize(("argument", "code"), [("--nonsense", 2), ("missing.pt", 2)])
def test_the_exit_code_is_that_of_the_command(argument: str, code: int) -> None:
    done = run("main()", "inspect", argument)
    assert done.returncode == code and "Error" in done.stderr


def test_temporary_folders_are_removed(tmp_path: Path) -> None:
    done = run(
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "import linexport.cli\n"
        "def command():\n"
        "    sys.folder = tempfile.TemporaryDirectory()\n"
        "    print(sys.folder.name)\n"
        "    sys.exit(3)\n"
        "linexport.cli.main = command\n"
        "main()"
    )
    assert done.returncode == 3
    assert done.stdout.strip().startswith(str(tmp_path)) and not list(tmp_path.iterdir())


def test_output_that_cannot_be_written_is_an_error() -> None:
    code = "import linexport.cli\nlinexport.cli.main = lambda: print('x')\nmain()"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", f"{BEGIN}{code}"], stdout=full)
    assert done.returncode == 120
