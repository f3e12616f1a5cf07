"""Memory that is refused to a thread of the pool: an error of the call, as ONNX Runtime's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import save

from linexport.plugins.cpu import library
from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from tests.support import SCRIPTS
from tests.support.layouts import Layout

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or not sys.platform.startswith("linux"),
    reason="a library is compiled that takes the place of glibc's malloc",
)


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("refusing") / "refuse_memory.so"
    source = SCRIPTS / "refuse_memory.cc"
    subprocess.run(["g++", "-shared", "-fPIC", "-O1", str(source), "-o", str(made)], check=True)
    return made


def test_memory_that_a_thread_is_refused_is_an_error_of_the_call(
    refusing: Path, tmp_path: Path
) -> None:
    """Long enough that threads of the pool have parts of it, on a busy machine too."""
    layout = Layout(LinearAttentionSpec(8, 8), 8, 32, 32, past=True)
    model, inputs = layout.model(), layout.inputs(np.random.default_rng(0), 2, 6000)
    del model.functions[:]
    save(model, tmp_path / "model.onnx")
    np.savez(tmp_path / "inputs.npz", **inputs)
    script = SCRIPTS / "with_refused_memory.py"
    arguments = (tmp_path / "model.onnx", library.path(), tmp_path / "inputs.npz")
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        env={**os.environ, "LD_PRELOAD": str(refusing)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"signal {-done.returncode}\n{done.stderr[-2000:]}"
    *refused, last = done.stdout.splitlines()
    assert last == "same True"
    errors = [line for line in refused if line.startswith("error")]
    assert errors, done.stdout
    assert all("Failed to allocate memory" in line for line in errors)
