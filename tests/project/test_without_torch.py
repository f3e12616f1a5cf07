"""Artifacts are opened, run and described where PyTorch is not installed."""

from __future__ import annotations

import json
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


def test_an_artifact_with_feature_maps_is_described(converted: Callable[..., Path]) -> None:
    command = ["inspect", str(converted("language_model", target="onnx")), "--json"]
    runs = [
        subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)
        for code in (RUN, RUN.replace('sys.modules["torch"] = None', ""))
    ]
    assert [done.returncode for done in runs] == [0, 0], runs[0].stdout + runs[0].stderr
    without, whole = (json.loads(done.stdout)["ops"] for done in runs)
    for ours, theirs in zip(without, whole, strict=True):
        assert ours["details"]
        assert ours["details"] == theirs["details"] or theirs["feature_map"] in ours["details"]
        assert {**theirs, **ours} == {**theirs, "details": ours["details"]}


def test_a_command_that_needs_pytorch_says_what_installs_it(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("")
    command = [sys.executable, "-c", RUN, "convert", str(tmp_path / "net.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 5, done.stderr
    assert "needs PyTorch, which is not installed. Run pip install" in done.stderr
