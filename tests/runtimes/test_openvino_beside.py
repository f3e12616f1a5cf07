"""Artifacts on OpenVINO's execution provider of the package beside onnxruntime.

It offers Intel's processors alone. Here it is told that every processor is one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import linexport
from tests.support import FACTORIES, ROOT, environments

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SHIM = ROOT / "tests/support/cpp/any_processor.cpp"
SOURCE = "reference_models:linear_rule"


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    """Environment of a process whose module of the package names the library that is told so."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    place, module = environments.made("openvino"), tmp_path / "site/onnxruntime_ep_openvino"
    real = place / "onnxruntime_ep_openvino/libonnxruntime_providers_openvino_plugin.so"
    library = tmp_path / "any_processor.so"
    command = ["c++", "-std=c++17", "-Wall", "-Werror", "-shared", "-fPIC", str(SHIM)]
    subprocess.run([*command, "-o", str(library), "-ldl"], check=True)
    module.mkdir(parents=True)
    (module / "__init__.py").write_text(f"def get_library_path(): return {str(library)!r}\n")
    path = os.pathsep.join(map(str, (module.parent, place, FACTORIES, ROOT)))
    return {**os.environ, "PYTHONPATH": path, "LINEXPORT_LIBRARY": str(real)}


def test_equals_the_original_and_leaves_nothing_to_the_cpu(
    variables: dict[str, str], tmp_path: Path
) -> None:
    """``validate`` opens several sessions, of which the library is registered for one."""
    folder = tmp_path / "artifact"
    linexport.convert(SOURCE, folder, target="onnx", bench=False, threads=1)
    command = [sys.executable, "-W", "ignore", "-m", "linexport", "validate", str(folder)]
    options = ["--source", SOURCE, "--provider", "openvino", "--strict", "--threads", "1", "--json"]
    done = subprocess.run([*command, *options], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for part in ("parity", "streaming"):
        assert found[part]["passed"] and found[part]["max_relative_error"] < 5e-6
    placed = found["placement"]
    assert "onnxruntime-ep-openvino" in placed["package"]
    assert placed["nodes"].keys() == {"OpenVINOExecutionProvider"}
