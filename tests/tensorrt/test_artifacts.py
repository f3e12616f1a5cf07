"""Artifacts with engines: what is said of them without a GPU, and with a stand-in for one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import linexport
from linexport import targets
from linexport.conversion.add_records import with_engines_timed
from linexport.errors import EnvironmentProblemError, UsageError
from linexport.manifest import read
from linexport.targets.base import OrtSession

pytestmark = pytest.mark.services


def test_what_was_not_run_is_said_to_be_not_checked(
    made: Path, manifest_of: Callable[..., Any]
) -> None:
    manifest = manifest_of(made)
    (engine,) = manifest.engines
    assert engine.checked is None and "No NVIDIA driver" in engine.reason
    assert engine.plugins and engine.layers and engine.scratch_bytes > 0
    assert (made / engine.file).stat().st_size == manifest.files[engine.file].bytes
    report = (made / "report.html").read_text()
    assert "its engines were not run" in report and "not checked" in report


def test_the_terminal_says_so_too(made: Path, cli: Callable[..., Any]) -> None:
    done = cli("validate", made, "--source", read(made).source.location)
    assert done.code == 0
    words = " ".join(done.out.split())
    assert "not checked No NVIDIA driver" in words and "its engines were not run" in words


def test_without_a_gpu_the_engine_does_not_open_and_the_onnx_model_runs(made: Path) -> None:
    with pytest.raises(EnvironmentProblemError, match="No NVIDIA driver"):
        linexport.load(made)
    x = np.ones((1, 5, 8), np.float32)
    assert linexport.load(made, engine=False).run(x)["output"].shape == (1, 5, 8)


def test_half_an_engine_is_refused_before_a_gpu_is_looked_for(made: Path) -> None:
    path = made / "model.sm89.engine"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UsageError, match=r"model\.sm89\.engine is damaged"):
        linexport.load(made)
    with pytest.raises(UsageError, match="only half of it was written"):
        linexport.load(made, verify=False)


class OnCpu:
    """A session like an engine's, of the ONNX model; ``error`` is added to its outputs."""

    def __init__(self, folder: Path, manifest: Any, error: float = 0.0) -> None:
        self.inner = OrtSession(folder / "model.onnx", 1)
        self.record, self.error = manifest.engines[0], error

    def run(self, inputs: Any, in_place: bool = False) -> dict[str, np.ndarray]:
        return {n: x + np.float32(self.error) for n, x in self.inner.run(inputs).items()}

    def time(self, inputs: Any) -> dict[str, Any]:
        assert self.run(inputs)
        return {"launched_ms": 1.0, "graph_ms": 0.5, "graph_problem": None}


@pytest.mark.parametrize("error", [0.0, 0.1])
def test_an_engine_that_runs_is_compared_with_the_original(
    made: Path, error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = targets.find_target("tensorrt-rtx")
    opened = replace(right, deploy=lambda folder, manifest: OnCpu(folder, manifest, error))
    monkeypatch.setitem(targets.loaded, "tensorrt-rtx", opened)
    source = read(made).source.location
    manifest = linexport.validate(made, source=source, threads=1, record=True)
    (engine,) = manifest.engines
    assert engine.checked is (error == 0.0)
    assert manifest.status == ("ok" if error == 0.0 else "parity_failed")
    if error:
        assert "differ from the original's" in engine.reason
        assert "but an engine made of it does not" in (made / "report.html").read_text()


def test_an_engine_that_runs_is_timed_by_length_one_token_first(
    made: Path, monkeypatch: pytest.MonkeyPatch, manifest_of: Callable[..., Any]
) -> None:
    from linexport.conversion.model_under_test import model_under_test
    from linexport.sources import load_model

    right = targets.find_target("tensorrt-rtx")
    monkeypatch.setitem(targets.loaded, "tensorrt-rtx", replace(right, deploy=OnCpu))
    manifest = manifest_of(made)
    loaded = load_model(manifest.source.location)
    tested = model_under_test(manifest, loaded, lambda: OnCpu(made, manifest))
    manifest = with_engines_timed(manifest, tested, made, 0)
    assert [row.length for row in manifest.engines[0].latency] == [1, 64]


@pytest.mark.parametrize("more", ["--no-plugins", "--quick"])
def test_tensorrt_ends_with_the_command_for_another_machine(
    more: str, cli: Callable[..., Any], factories: Any, tmp_path: Path
) -> None:
    from linexport.plugins.tensorrt.flavour import TENSORRT

    if TENSORRT.installed:
        pytest.skip("TensorRT is installed here")
    options = ("--precision", "bf16", "--dim", "seq=1:8:64", "--timing-cache", "times")
    options += (more,)
    place = tmp_path / "out"
    source = factories.source("small")
    done = cli("convert", source, "-o", place, "--target", "tensorrt", *options, "--json")
    assert done.code == 5
    message = json.loads(done.out)["message"]
    assert "TensorRT is not installed" in message and "pip install" in message
    for word in (
        "linexport convert",
        source,
        "--target tensorrt",
        "--precision bf16",
        "--timing-cache times",
        more,
        "seq=1:8:64",
    ):
        assert word in message
    assert not place.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sm", "89"), "are of targets that build engines"),
        (("--target", "tensorrt-rtx", "--sm", "90"), "--sm names 90"),
        (("--target", "tensorrt-rtx", "--sm", "75"), "no kernels for compute capability 7.5"),
        (("--target", "tensorrt-rtx", "--sm", "t4"), "7.5 (Triton compiles them for GPUs before"),
        (("--target", "tensorrt-rtx", "--sm", "x"), "No GPU is known as 'x'"),
        (("--target", "tensorrt-rtx", "--sm", "0"), "expected positive integers"),
        (("--target", "tensorrt-rtx", "--precision", "int8"), "expected one of fp32, fp16, bf16"),
        (("--target", "tensorrt-rtx", "--timing-cache", "x"), "times nothing while it builds"),
        (("--target", "tensorrt-rtx", "--quick"), "no quickly deployable plugins"),
        (("--target", "tensorrt", "--quick", "--no-plugins"), "contradict each other"),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(
    rtx: Any,
    cli: Callable[..., Any],
    factories: Any,
    tmp_path: Path,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    done = cli("convert", factories.source("small"), "-o", tmp_path / "out", *arguments)
    assert done.code == 2 and message in done.err
