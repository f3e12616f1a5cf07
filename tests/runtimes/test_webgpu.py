"""Artifacts on WebGPU's execution provider, with Vulkan in software where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import linexport
from tests.runtimes.cases import calls, error
from tests.support import FACTORIES, ROOT, environments

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

LIMIT = 1e-5
CAUSAL = "reference_models:linear_rule"
RUN = Path(__file__).with_name("programs") / "run_provider.py"
CHROMIUM = Path("/usr/lib/chromium")


def vulkan(folder: Path) -> dict[str, str]:
    """Variables by which ONNX Runtime finds the Vulkan that Chromium draws with in software."""
    described = CHROMIUM / "vk_swiftshader_icd.json"
    if not described.is_file():
        pytest.skip(f"{described} is missing: Debian's chromium has it")
    icd = json.loads(described.read_text())
    icd["ICD"]["library_path"] = str(CHROMIUM / Path(icd["ICD"]["library_path"]).name)
    (folder / "icd.json").write_text(json.dumps(icd))
    (folder / "libvulkan.so.1").symlink_to(CHROMIUM / "libvulkan.so.1")
    return {"VK_ICD_FILENAMES": str(folder / "icd.json"), "LD_LIBRARY_PATH": str(folder)}


def test_equals_the_original_as_a_whole_and_in_pieces(tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    linexport.convert(CAUSAL, folder, target="onnx", bench=False, threads=1)
    asked = calls(CAUSAL, folder)
    (tmp_path / "calls.json").write_text(json.dumps([call.to_json() for call in asked]))
    path = os.pathsep.join(map(str, (environments.made("webgpu"), FACTORIES, ROOT)))
    variables = {**os.environ, **vulkan(tmp_path), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    done = subprocess.run(
        [sys.executable, RUN, "webgpu", folder, tmp_path / "calls.json", tmp_path / "results"],
        **{"env": variables, "capture_output": True, "text": True, "timeout": 900},
    )

    assert done.returncode == 0, done.stderr
    assert "74 of 101 nodes run on webgpu (onnxruntime-webgpu" in done.stderr
    for i, call in enumerate(asked):
        with np.load(tmp_path / "results" / f"{i}.npz") as outputs:
            assert error(call, dict(outputs)) < LIMIT, i
