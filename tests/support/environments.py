"""Environments of other runtimes, which scripts of tools/ make once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT


def made(name: str) -> Path:
    """Make an environment, which takes minutes the first time; the test is skipped where it fails.

    Args:
        name: of the script tools/NAME_environment, and of the folder .NAME at the root, for which
            LINEXPORT_NAME may name another.
    """
    place = Path(os.environ.get(f"LINEXPORT_{name.upper()}", ROOT / f".{name}"))
    done = subprocess.run(
        [str(ROOT / "tools" / f"{name}_environment"), str(place)],
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"tools/{name}_environment failed: {done.stderr[-300:]}")
    return place
