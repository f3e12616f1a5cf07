"""The library under AddressSanitizer and UBSan, and with lesser instructions."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.native import build, run_operator_tests

pytestmark = pytest.mark.slow


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
    assert "passed" in run_operator_tests(environment)


@pytest.mark.parametrize("instructions", ["base", "avx2"])
def test_lesser_instructions(instructions: str) -> None:
    assert "passed" in run_operator_tests({"LINEXPORT_INSTRUCTION_SET": instructions})
