"""The library under AddressSanitizer and UBSan, and with lesser instructions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.native import build

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
OTHERS = {
    *("test_sanitizers.py", "test_threads.py", "test_allocations.py"),
    *("test_library.py", "test_proven.py"),
}
"""Tests of builds, of the file and of artifacts; those of operators are the rest."""


def run(environment: dict[str, str]) -> str:
    """The tests of all operators in a process with this environment."""
    tests = [str(path) for path in sorted(HERE.glob("test_*.py")) if path.name not in OTHERS]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    command += ["-m", "not slow"]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def test_address_and_undefined_behaviour_sanitizers_find_nothing(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    made = build(tmp_path, "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    # The sanitizer looks for the C++ runtime's throw when it is loaded: Python brings none.
    names = [f"-print-file-name={name}.so" for name in ("libasan", "libstdc++")]
    found = [subprocess.run(["g++", n], capture_output=True, text=True).stdout for n in names]
    environment = {
        "LINEXPORT_TEST_LIBRARY": str(made),
        "LD_PRELOAD": " ".join(found).replace("\n", ""),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python frees nothing at its end
    }
    assert "passed" in run(environment)


@pytest.mark.parametrize("instructions", ["base", "avx2"])
def test_lesser_instructions(instructions: str) -> None:
    assert "passed" in run({"LINEXPORT_INSTRUCTION_SET": instructions})
