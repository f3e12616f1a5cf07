"""The stand-in for the CUDA driver, compiled, and programs run with it in libcuda's place."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from linexport.plugins.tensorrt.library import cuda_folders
from tests.support import FACTORIES, ROOT, SCRIPTS

LEFT = ("allocations", "modules", "streams", "graphs", "events", "contexts")
"""What a program may leave on a device, by its name in the last line of the log."""


def compiled(folder: Path) -> Path:
    """Return a folder with the stand-in for libcuda.so.1; skip where it cannot be compiled."""
    pytest.importorskip("cuda.bindings", reason="the driver is called through cuda-bindings")
    include = next((f for f in cuda_folders() if (f / "cuda.h").is_file()), None)
    if shutil.which("c++") is None or include is None:
        pytest.skip("no C++ compiler, or no cuda.h: Triton carries it")
    source = ROOT / "tests/support/cpp/fake_driver.cpp"
    command = ["c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-isystem", str(include)]
    command += ["-o", str(folder / "libcuda.so.1"), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return folder


def environment(driver: Path, log: Path, sm: int = 90, devices: int = 1) -> dict[str, str]:
    """Return that of a program that runs with the stand-in."""
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(driver),
        "FAKE_DRIVER_LOG": str(log),
        "FAKE_DRIVER_SM": str(sm),
        "FAKE_DRIVER_DEVICES": str(devices),
    }


def play(driver: Path, artifact: Path, library: str, name: str, place: Path) -> SimpleNamespace:
    """Play a scenario; return its ``result`` and the driver's ``log``, a list of dicts."""
    log = place / f"{library}-{name}.log"
    log.unlink(missing_ok=True)
    command = [sys.executable, str(SCRIPTS / "on_stand_in.py"), str(artifact), library, name]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(driver, log, 89, 2)
        | {"PYTHONPATH": f"{ROOT}:{FACTORIES}", "XDG_CACHE_HOME": str(place)},
    )
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
    return SimpleNamespace(result=json.loads(done.stdout), log=rows)


def between(log: list[dict[str, Any]], first: str, last: str) -> list[dict[str, Any]]:
    """Return the lines of a log between two marks."""
    names = [row.get("name") if row["call"] == "mark" else None for row in log]
    return log[names.index(first) + 1 : names.index(last)]
