"""Artifacts on OpenVINO's execution provider, with an ONNX Runtime that has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import linexport
from linexport.manifest import Manifest
from tests.runtimes.cases import calls, error
from tests.support import FACTORIES, ROOT
from tests.support.command_line import Result
from tests.support.families import TINY, save_model

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]

LIMIT = 1e-5
ON = ("--provider", "openvino", "--threads", 1)
CAUSAL, BIDIRECTIONAL = "reference_models:linear_rule", "reference_models:bidirectional"

RUN = Path(__file__).with_name("programs") / "run_provider.py"

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def run(environment: Path) -> Run:
    """``run(*arguments)``: Python, or the program after "-m", with OpenVINO's ONNX Runtime."""
    path = os.pathsep.join(map(str, (environment / "onnxruntime-openvino", FACTORIES, ROOT)))
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def start(*arguments: object) -> Result:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *map(str, arguments)],
            **{"env": variables, "capture_output": True, "text": True, "timeout": 300},
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return start


def artifact_of(source: str, folder: Path, **options: Any) -> Path:
    linexport.convert(source, folder, bench=False, threads=1, **{"target": "onnx", **options})
    return folder


def test_equals_the_original_as_a_whole_and_in_pieces(run: Run, tmp_path: Path) -> None:
    """By ``validate``, and by the calls that every other runtime is asked."""
    folder = artifact_of(CAUSAL, tmp_path / "artifact")
    result = run("-m", "linexport", "validate", folder, "--source", CAUSAL, *ON, "--json")
    assert result.code == 0, result.err
    found = result.json()
    assert found["parity"]["passed"] and found["parity"]["max_relative_error"] < LIMIT
    assert found["streaming"]["passed"] and found["streaming"]["max_relative_error"] < LIMIT
    placed = found["placement"]
    assert placed["provider"] == "openvino" and "onnxruntime-openvino" in placed["package"]
    assert placed["nodes"]["OpenVINOExecutionProvider"] > placed["nodes"]["CPUExecutionProvider"]
    assert placed["on_cpu"] == {"LinearAttention": {"Scan": 1}}
    asked = calls(CAUSAL, folder)
    (tmp_path / "calls.json").write_text(json.dumps([call.to_json() for call in asked]))
    done = run(RUN, "openvino", folder, tmp_path / "calls.json", tmp_path / "results")
    assert done.code == 0, done.err
    for i, call in enumerate(asked):
        with np.load(tmp_path / "results" / f"{i}.npz") as outputs:
            assert error(call, dict(outputs)) < LIMIT, i


@pytest.mark.slow
def test_a_hybrid_with_softmax_attention_and_a_mask_equals_its_original(
    run: Run, tmp_path: Path
) -> None:
    """Its positions are a Clip of int64, which ``Provider.amend`` writes as a Max."""
    model = tmp_path / "model"
    sizes = {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    save_model({**TINY["qwen3_5_text"], **sizes}, "qwen3_5_text", model)
    folder = artifact_of(str(model), tmp_path / "artifact")
    result = run("-m", "linexport", "validate", folder, *ON, "--json")
    assert result.code == 0, result.err
    found = result.json()
    assert found["parity"]["passed"] and found["parity"]["max_relative_error"] < 10 * LIMIT
    assert found["streaming"]["passed"]


CLIP = """
import numpy, onnxruntime
from onnx import TensorProto, helper
x, y = (helper.make_tensor_value_info(n, TensorProto.INT64, ["n"]) for n in "xy")
least = helper.make_tensor("least", TensorProto.INT64, [], [1])
node = helper.make_node("Clip", ["x", "least"], ["y"])
graph = helper.make_graph([node], "clip", [x], [y], [least])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
session = onnxruntime.InferenceSession(
    model.SerializeToString(), providers=["OpenVINOExecutionProvider"]
)
print(session.run(None, {"x": numpy.arange(4)})[0].tolist())
"""


def test_the_fault_of_clip_is_there_still(run: Run) -> None:
    """Where it is not, ``Provider.amend`` has no use any longer: [1, 1, 2, 3] is right."""
    result = run("-c", CLIP)
    assert result.code == 0 and result.out.strip() == "[0, 0, 0, 0]"


def test_strict_fails_where_attention_is_left_to_the_cpu_and_holds_where_none_is(
    run: Run, tmp_path: Path
) -> None:
    causal = artifact_of(CAUSAL, tmp_path / "causal")
    before = (causal / "manifest.json").read_bytes()
    refused = run("-m", "linexport", "validate", causal, "--source", CAUSAL, *ON, "--strict")
    assert refused.code == 5 and "LinearAttention (1 Scan)" in " ".join(refused.err.split())
    assert (causal / "manifest.json").read_bytes() == before
    both = artifact_of(BIDIRECTIONAL, tmp_path / "both")
    given = (both, "--source", BIDIRECTIONAL, *ON, "--strict", "--json")
    held = run("-m", "linexport", "validate", *given)
    assert held.code == 0, held.err
    assert held.json()["parity"]["passed"] and held.json()["placement"]["on_cpu"] == {}


def test_operators_that_it_does_not_know_are_an_error_not_a_fall_back(
    run: Run, tmp_path: Path
) -> None:
    """This ONNX Runtime is older than the kernel that target ort uses."""
    folder = artifact_of(CAUSAL, tmp_path / "artifact", target="ort")
    result = run("-m", "linexport", "validate", folder, "--source", CAUSAL, *ON)
    assert result.code == 5 and "does not open the model" in result.err
    assert "Traceback" not in result.err


@pytest.mark.slow
def test_measurements_say_what_they_are_of(
    run: Run, tmp_path: Path, manifest_of: Callable[[Path], Manifest]
) -> None:
    folder = artifact_of(CAUSAL, tmp_path / "artifact")
    given = ("-m", "linexport", "bench", folder, "--source", CAUSAL, *ON)
    assert run(*given, "--lengths", 64).code == 0
    manifest = manifest_of(folder)
    assert manifest.measurement is not None and manifest.measurement.placement is not None
    assert manifest.measurement.placement.provider == "openvino"
    assert manifest.memory is not None and manifest.memory[0].artifact_mb is not None
    table = run(*given, "--prefill", 8, "--decode", 2, "--repeats", 1)
    assert "| pp8 | artifact, openvino |" in table.out and "| pp8 | PyTorch |" in table.out
