"""Engines that cannot be run, opened by TensorRT-RTX itself as far as it goes without a GPU.

Its runtime reads the file before it needs a driver, so that only the GPU is a stand-in. Each
problem ends with one error that says what to do, and the process goes on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import linexport
from linexport.errors import EnvironmentProblemError, UsageError
from linexport.manifest import read
from linexport.plugins.tensorrt import flavour
from linexport.targets.trt import session

ENGINE = "model.sm89.engine"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU of compute capability 8.9 that can do nothing."""
    made = SimpleNamespace(sm=89, stream=0, current=nullcontext, close=lambda: None)
    monkeypatch.setattr(session, "Device", lambda index: made)
    return made


def replaced(folder: Path, content: bytes) -> None:
    """Another engine, which the manifest takes for its own."""
    (folder / ENGINE).write_bytes(content)
    rewritten(folder, sha256=hashlib.sha256(content).hexdigest())
    manifest = json.loads((folder / "manifest.json").read_text())
    digest = hashlib.sha256(content).hexdigest()
    manifest["files"][ENGINE] = {"bytes": len(content), "sha256": digest}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def rewritten(folder: Path, **changes: Any) -> None:
    """Another record of the engine."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["engines"][0].update(changes)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "content",
    [b"", b"no engine at all" * 100, "half"],
    ids=["empty", "another file", "half"],
)
def test_what_is_no_engine_is_refused_by_tensorrt_with_its_reason(
    made: Path, gpu: SimpleNamespace, content: Any
) -> None:
    whole = (made / ENGINE).read_bytes()
    replaced(made, whole[: len(whole) // 2] if content == "half" else content)
    with pytest.raises(EnvironmentProblemError, match=r"cannot open model\.sm89\.engine: \w+"):
        linexport.load(made)


def test_an_engine_without_a_driver_is_refused_by_tensorrt_too(
    made: Path, gpu: SimpleNamespace
) -> None:
    with pytest.raises(EnvironmentProblemError, match=r"cannot open model\.sm89\.engine: \w+"):
        linexport.load(made)


def test_a_gpu_of_another_kind_is_named(made: Path, gpu: SimpleNamespace) -> None:
    gpu.sm = 120
    with pytest.raises(EnvironmentProblemError, match=r"8\.9; this GPU has 12\.0.*sms=\[120\]"):
        linexport.load(made)


def test_an_engine_of_another_version_is_refused(made: Path, gpu: SimpleNamespace) -> None:
    rewritten(made, version="1.2.0")
    with pytest.raises(EnvironmentProblemError, match=r"built by TensorRT-RTX 1\.2\.0; installed"):
        linexport.load(made)


def test_without_the_library_its_install_command_is_given(
    made: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., Any]
) -> None:
    """And everything else of the artifact is checked as ever."""

    def missing(found: flavour.Flavour) -> Any:
        raise EnvironmentProblemError(
            f"{found.title} is not installed. Install it: {found.install}"
        )

    monkeypatch.setattr(flavour, "_load", missing)
    with pytest.raises(EnvironmentProblemError, match=r"pip install '\.\[tensorrt-rtx\]'"):
        linexport.load(made)
    done = cli("validate", made, "--source", read(made).source.location)
    words = " ".join(done.out.split())
    assert done.code == 0 and "not checked TensorRT-RTX is not installed" in words


SHAPES = {"x": ["batch", "seq", 8], "past_state_0": ["batch", 2, 4, 4]}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ((1, 2, 8, 8), r"past_state_0 has shape \(1, 2, 8, 8\); expected \('batch', 2, 4, 4\)"),
        ((1, 2, 4), r"past_state_0 has shape \(1, 2, 4\)"),
        ((3, 2, 4, 4), r"past_state_0 has shape \(3, 2, 4, 4\).*'batch': 1"),
        (None, r"Found the inputs \['x'\]; expected \['past_state_0', 'x'\]"),
    ],
    ids=["of another model", "of another rank", "of another batch", "missing"],
)
def test_a_state_that_is_not_this_models_is_refused(
    state: tuple[int, ...] | None, message: str
) -> None:
    feeds = {"x": np.ones((1, 5, 8), np.float32)}
    if state is not None:
        feeds["past_state_0"] = np.zeros(state, np.float32)
    with pytest.raises(UsageError, match=message):
        session.sizes_of(SHAPES, feeds)
