"""Artifacts are opened, run and described where PyTorch is not installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

RUN = """
import sys
sys.modules["torch"] = None
from linexport.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("target", "options"), [("ort", {}), ("onnx", {}), ("ort-cuda", {"precision": "bf16"})]
)
def test_a_text_is_generated(
    converted: Callable[..., Path], target: str, options: dict[str, str]
) -> None:
    artifact = str(converted("language_model", target=target, **options))
    command = ["generate", artifact, "--prompt", "a", "--max-tokens", "2"]
    done = subprocess.run([sys.executable, "-c", RUN, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
