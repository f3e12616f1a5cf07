"""Memory that is refused to a thread of the pool: an error of the call, as ONNX Runtime's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import save

from linexport.plugins.cpu import library
from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from linexport.targets.cpu_fusion import with_programs
from linexport.targets.cpu_fusion.chains import with_chains
from tests.support import SCRIPTS
from tests.support.layouts import Layout
from tests.support.mixers import mixer

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


def models() -> dict[str, tuple[onnx.ModelProto, dict[str, np.ndarray]]]:
    """Models whose threads need memory of their own: states, features, and values of a chain."""
    rng = np.random.default_rng(0)
    long, shared = (
        Layout(LinearAttentionSpec(8, 8), 8, 32, 32, past=True),
        LinearAttentionSpec(1, 1),
    )
    one = Layout(shared, 1, 512, 512, past=True)
    half = Layout(LinearAttentionSpec(2, 2), 2, 64, 64, past=True, dtype="bfloat16")
    chain = with_chains(with_programs(mixer()))
    shapes = {
        i.name: [
            {"B": 4, "T": 3000}.get(d.dim_param, d.dim_value) for d in i.type.tensor_type.shape.dim
        ]
        for i in chain.graph.input
    }
    drawn = {n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}
    return {
        "states": (long.model(), long.inputs(rng, 2, 6000)),
        "one state": (one.model(), one.inputs(rng, 2, 600)),
        "half": (
            half.model(),
            {n: v.astype(np.float32) for n, v in half.inputs(rng, 2, 3000).items()},
        ),
        "chain": (chain, drawn),
    }


def test_memory_that_a_thread_is_refused_is_an_error_of_the_call(
    refusing: Path, tmp_path: Path
) -> None:
    """Long enough that threads of the pool have parts of it, on a busy machine too."""
    folders = []
    for name, (model, inputs) in models().items():
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        del model.functions[:]
        save(model, folders[-1] / "model.onnx")
        np.savez(folders[-1] / "inputs.npz", **inputs)
    script = SCRIPTS / "with_refused_memory.py"
    done = subprocess.run(
        [sys.executable, str(script), str(library.path()), *map(str, folders)],
        env={**os.environ, "LD_PRELOAD": str(refusing)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"signal {-done.returncode}\n{done.stdout}{done.stderr[-2000:]}"
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines] == [[str(f), n] for f in folders for n in "24"]
    for folder, _, errors, same in lines:
        assert errors.count("Failed to allocate memory") == 1 and same == "True", (folder, errors)
