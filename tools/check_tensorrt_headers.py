"""Compile the plugin library and run.cpp with the headers of versions of TensorRT.

git clone https://github.com/NVIDIA/TensorRT
python tools/check_tensorrt_headers.py TensorRT --json docs/data/tensorrt_headers.json
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measurement

import linexport

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support/factories")]
from tests.support import tensorrt_headers as headers  # noqa: E402

FIRST = 10
"""Major version that IPluginV3 came with."""

VERSION_FILE = "include/NvInferVersion.h"


def main() -> int:
    """Print a line for each version; exit 1 where one does not compile."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    text = "folder of headers, or git folder of github.com/NVIDIA/TensorRT"
    parser.add_argument("places", nargs="+", type=Path, metavar="FOLDER", help=text)
    measurement.add_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        prepared, found = Path(work) / "prepared", []
        convert = {"target": "tensorrt", "sms": (90,), "dims": ("seq=1:16:200",), "bench": False}
        linexport.convert("small_models:small", prepared, **convert)
        for include, commit in folders(options.places, Path(work)):
            found.append({"commit": commit, **checked(prepared, include, Path(work))})
            said = found[-1]["failure"] or f"{found[-1]['creators']} plugin creators"
            print(f"{found[-1]['version']:<14}{said}", flush=True)
    measurement.write(
        options.json, {"compiler": compiler(), "flags": headers.FLAGS, "versions": found}
    )
    return int(any(one["failure"] for one in found))


def folders(places: list[Path], work: Path) -> Iterator[tuple[Path, str | None]]:
    """Yield folders of headers, with the commits of those that come from git, oldest first."""
    for place in places:
        if (place / "NvInferVersion.h").is_file():
            yield place, None
            continue
        for commit in reversed(git(place, "log", "--format=%H", "--", VERSION_FILE).split()):
            folder = work / commit
            folder.mkdir()
            archive = ["git", "-C", str(place), "archive", commit, "include"]
            packed = subprocess.run(archive, check=True, capture_output=True).stdout
            subprocess.run(["tar", "-x", "-C", str(folder)], input=packed, check=True)
            include = folder / "include"
            if int(headers.version(include).partition(".")[0]) >= FIRST:
                yield include, commit


def git(place: Path, *words: str) -> str:
    """Return what git prints of a folder."""
    command = ["git", "-C", str(place), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def checked(prepared: Path, include: Path, work: Path) -> dict[str, Any]:
    """Return the version, and the number of creators or the compiler's first lines."""
    version = headers.version(include)
    try:
        made = headers.compiled(prepared, include, work / f"{version}.so")
    except subprocess.CalledProcessError as error:
        return {"version": version, "creators": None, "failure": error.stderr[:500]}
    return {"version": version, "creators": headers.creators(made), "failure": None}


def compiler() -> str:
    """Return the compiler's name and version."""
    return subprocess.run(
        ["c++", "--version"], check=True, capture_output=True, text=True
    ).stdout.splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
