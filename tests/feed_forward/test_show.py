"""The tool that holds trained networks against the theory, with fewer steps and draws."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "show_feed_forward.py"


@pytest.mark.slow
def test_what_is_claimed_of_trained_networks_holds(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    arguments = ["--steps", "400", "--draws", "60", "--json", str(numbers)]
    done = subprocess.run(
        [sys.executable, str(TOOL), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(numbers.read_text())
    assert all(claim["holds"] for claim in found.values())
    assert found["least squares"]["before"] > 0.9
    assert found["least squares"]["cost_factor"] > 1, "an honest no"
    assert {"Bernstein's bias", "Taylor's variance", "Taylor's E[K]"} <= set(found)
