"""A conversion for ONNX Runtime imports nothing of TensorRT, of kernels or of optional rooms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from tests.support import ROOT

SCRIPT = ROOT / "tests" / "support" / "scripts" / "modules_of_a_conversion.py"

ABSENT = (
    "linexport.plugins.tensorrt",
    "linexport.plugins.kernels",
    "linexport.targets.trt",
    "linexport.targets.tensorrt",
    "linexport.targets.tensorrt_rtx",
    "linexport.targets.onnx27",
    "linexport.linearization",
    "linexport.maps",
    "linexport.models.feed_forward",
    "tensorrt",
    "tensorrt_rtx",
)
"""Triton is not among them: PyTorch imports it itself, where it is installed, to trace."""


def test_a_conversion_to_ort_imports_what_it_needs(
    factories: SimpleNamespace, tmp_path: Path
) -> None:
    source = factories.source("masked")
    command = [sys.executable, SCRIPT, source, tmp_path / "artifact"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), *map(str, sys.path)])
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    imported = json.loads(done.stdout.splitlines()[-1])
    assert "linexport.targets.ort" in imported
    assert [
        m for m in imported if m.startswith(tuple(f"{a}." for a in ABSENT)) or m in ABSENT
    ] == []


def test_help_lists_targets_without_importing_any() -> None:
    code = (
        "import sys; from linexport.cli.options import target_names; names = target_names();"
        "print(names, [m for m in sys.modules if m in ('torch', 'onnx', 'linexport.targets.ort')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['onnx', 'onnx27', 'ort', 'tensorrt', 'tensorrt-rtx'] []"
