"""The operators as other compilers make them, and on 64-bit ARM, by qemu-user."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.environments import made
from tests.support.native import build, run_operator_tests

pytestmark = pytest.mark.slow

FLAGS = ("-O3", "-g0", "-fno-wrapv", "-fvisibility=hidden")
"""Those of setup.py."""
ARM = "--target=aarch64-linux-gnu"


def need(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


@pytest.mark.parametrize("runtime", ["libstdc++", "libc++"])
def test_clang(runtime: str, tmp_path: Path) -> None:
    """libc++ is the C++ library of macOS."""
    need("clang++")
    if subprocess.run(
        [
            "clang++",
            f"-stdlib={runtime}",
            "-fsyntax-only",
            "-include",
            "vector",
            "-xc++",
            "/dev/null",
        ]
    ).returncode:
        pytest.skip(f"{runtime} is not installed")
    library = build(tmp_path, *FLAGS, f"-stdlib={runtime}", compiler="clang++")
    for instructions in ("avx512", "avx2", "base"):
        environment = {
            "LINEXPORT_TEST_LIBRARY": str(library),
            "LINEXPORT_INSTRUCTION_SET": instructions,
        }
        assert "passed" in run_operator_tests(environment)


@pytest.mark.parametrize("compiler, flags", [("aarch64-linux-gnu-g++", ()), ("clang++", (ARM,))])
def test_arm(compiler: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    need(compiler, "aarch64-linux-gnu-g++", "qemu-aarch64")  # the first brings the system's headers
    python = made("arm") / "bin/python"
    library = build(tmp_path, *FLAGS, *flags, compiler=compiler)
    environment = {"LINEXPORT_TEST_LIBRARY": str(library), "LINEXPORT_TEST_PYTHON": str(python)}
    assert "passed" in run_operator_tests(environment)
