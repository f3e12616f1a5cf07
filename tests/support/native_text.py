"""linexport_text.h of prepared folders, compiled."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path

CPP = Path(__file__).parent / "cpp"
LIBRARIES = ("-lpcre2-8", "-lutf8proc", "-ldl")
FLAGS = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror")
HEADERS = "#include <utf8proc.h>\n#define PCRE2_CODE_UNIT_WIDTH 8\n#include <pcre2.h>\n"


def _compiler() -> str | None:
    found = shutil.which("c++")
    if found is None:
        return None
    command = [found, "-x", "c++", "-fsyntax-only", "-"]
    done = subprocess.run(command, input=HEADERS, text=True, capture_output=True)
    return found if done.returncode == 0 else None


COMPILER = _compiler()
"""A C++ compiler that finds PCRE2 and utf8proc; None without one."""


def header() -> str:
    """The header, as prepared folders have it."""
    templates = resources.files("linexport.targets.trt").joinpath("templates")
    return templates.joinpath("linexport_text.h.txt").read_text()


def compiled(source: Path, output: Path, *include: Path) -> Path:
    """Compile a program with the libraries of the header."""
    assert COMPILER is not None
    paths = [word for folder in include for word in ("-isystem", str(folder))]
    command = [COMPILER, *FLAGS, *paths, str(source), "-o", str(output), *LIBRARIES]
    subprocess.run(command, check=True)
    return output


@functools.cache
def probe() -> Path:
    """The program ``tokenizer_probe.cpp``."""
    folder = Path(tempfile.mkdtemp(prefix="linexport-probe-"))
    (folder / "linexport_text.h").write_text(header())
    return compiled(CPP / "tokenizer_probe.cpp", folder / "probe", folder)
