"""The environment of other runtimes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT


@pytest.fixture(scope="session")
def environment() -> Path:
    """The other runtimes; made once, as it takes minutes."""
    place = Path(os.environ.get("LINEXPORT_RUNTIMES", ROOT / ".runtimes"))
    made = subprocess.run(
        [str(ROOT / "tools" / "runtimes_environment"), str(place)],
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    if made.returncode:
        pytest.skip(f"the environment of other runtimes cannot be made: {made.stderr[-300:]}")
    return place
