"""An op of another package: found, traced, converted, streamed; or refused, by name and reason."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import SCRIPTS

LEAKY_SUM = SCRIPTS.parent / "extension" / "leaky_sum.py"

AGAIN = """
from dataclasses import replace
from leaky_sum import OP as FIRST
from onnx import defs


def renamed():
    own = FIRST.schema
    types = [(c.type_param_str, c.allowed_type_strs, "") for c in own.type_constraints]
    formal = {"inputs": own.inputs, "outputs": own.outputs, "type_constraints": types}
    return defs.OpSchema("Again", own.domain, own.since_version, "", **formal)


def __getattr__(name):
    changes = {
        "OP": {},
        "RENAMED": {"schema": renamed()},
        "AXIS": {"token_axis": {"x": 1, "z": 1}},
        "LOST": {"token_axis": {"y": 1}},
    }
    return replace(FIRST, **changes[name])
"""

pytestmark = pytest.mark.services

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """``run(entries, *arguments)``: Python where a distribution declares those entry points."""

    def start(entries: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        info = tmp_path / "leaky-0.3.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: leaky\nVersion: 0.3\n")
        (info / "entry_points.txt").write_text(f"[linexport.ops]\n{entries}\n")
        shutil.copy(LEAKY_SUM, tmp_path)
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, env=environment
        )

    return start


@pytest.mark.parametrize("target", ["ort", pytest.param("onnx", marks=pytest.mark.slow)])
def test_an_op_of_another_package_converts_and_streams(
    run: Run, target: str, tmp_path: Path
) -> None:
    script = str(SCRIPTS / "use_leaky_sum.py")
    done = run("leaky_sum = leaky_sum:OP", script, target, str(tmp_path / "artifact"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["status"] == "ok" and found["streaming"] is True
    assert found["fused"] == {"LeakySum": 1} and found["lowerings"] == ["portable"]
    assert found["states"] == ["LeakySum", "Positions"]
    assert found["details"] == "rate 0.75"
    assert found["stream_error"] < 1e-5 and found["oracle_error"] < 1e-5


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("other = leaky_sum:Nothing", "declared by package leaky 0.3, cannot be loaded"),
        ("other = leaky_sum:portable", "declared by package leaky 0.3, is a function"),
        (
            "other = linexport.plugins.ops.causal_conv:OP\na = leaky_sum:OP\nb = leaky_again:OP",
            "declared by package leaky 0.3, declares the op LeakySum, which there is already",
        ),
        (
            "a = leaky_sum:OP\nb = leaky_again:RENAMED",
            "declares the PyTorch operator leaky_sum, which there is already",
        ),
        ("a = leaky_again:AXIS", "LeakySum: token_axis names z, neither input nor output"),
        ("a = leaky_again:LOST", "LeakySum has states, and its token_axis lacks 'x'"),
    ],
)
def test_one_that_cannot_be_used_is_one_error(
    run: Run, entry: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "leaky_again.py").write_text(AGAIN)
    done = run(entry, "-m", "linexport", "inspect", "leaky_sum:model", "--json")
    assert done.returncode == 5 and "Traceback" not in done.stderr
    assert reason in done.stdout + done.stderr
