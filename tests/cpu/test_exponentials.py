"""Exponentials of the library against float64, whatever a compiler makes of products and sums."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.native import SOURCES

PROGRAM = Path(__file__).parents[1] / "support/scripts/check_exponentials.cc"
FORMS = {"exponential", "exponential_of_negative", "exponential_of_decay"}
ALLOWED = 6.5
"""Units of 2^-24, of which ln 2 as one float costs 5.9 near -87."""


@pytest.mark.parametrize("step", [1009, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
@pytest.mark.parametrize("flags", ["-O1 -ffp-contract=off", "-O3 -ffp-contract=fast"])
def test_relative_errors(compiler: str, flags: str, step: int, tmp_path: Path) -> None:
    """Of each ``step``-th float32; GCC without -O2 makes no fused multiply-add of its own."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    made = tmp_path / "check"
    sources = [PROGRAM, SOURCES / "instruction_set.cc"]
    common = ["-std=c++17", "-Wno-psabi", f"-I{SOURCES}", f"-I{PROGRAM.parent}"]
    subprocess.run([compiler, *common, *flags.split(), *sources, "-o", made], check=True)
    found = subprocess.run([made, str(step)], capture_output=True, text=True, check=True)
    errors: dict[tuple[str, str], float] = {}
    for line in found.stdout.splitlines():
        instructions, form, error, _ = line.split()
        errors[instructions, form] = float(error)
    assert {form for _, form in errors} == FORMS
    assert all(error <= ALLOWED for error in errors.values()), found.stdout
