"""Every example runs and does what it says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from linexport.plugins.cpu import library as cpu
from tests.support import ROOT
from tests.support.families import TINY, save_model

EXAMPLES = ROOT / "examples"
TOKENS = ["100", "101", "102", "32", "109"]
BAD_MANIFESTS = {
    "": "byte 0: expected a value",
    "[" * 99: "byte 51: expected fewer nested values",
    '{"states": [}': "byte 12: expected a value",
    '{"states": []}': "no entry inputs",
    '{"states": [], "inputs": [], "outputs": []}': "no input, or no output",
    '{"states": [{"past": "a", "present": "b", "dtype": "float32", "grows": null, "initial": 0, '
    '"shape": ["batch", "x"]}]}': "a has no usable shape",
}


class Layer(torch.nn.Module):
    """Causal linear attention from vectors to vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return torch.tril(q @ k.mT) @ v


def run(*command: object, cwd: Path) -> str:
    """Return what a program prints; it must succeed."""
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def artifact(provide: Callable[[str, Path], None], tmp_path: Path) -> Path:
    provide("artifact", tmp_path)
    return tmp_path / "artifact"


def best_tokens(artifact: Path) -> list[int]:
    """The argmax after each token, from whole sequences."""
    import linexport

    whole = linexport.load(artifact).run(np.array([[int(t) for t in TOKENS]]))["output"]
    return [int(token) for token in whole[0].argmax(-1)]


@pytest.mark.services
def test_streaming_in_python(artifact: Path) -> None:
    printed = run(sys.executable, "stream.py", artifact, *TOKENS, cwd=EXAMPLES / "streaming")
    assert [int(line) for line in printed.split()] == best_tokens(artifact)


@pytest.mark.services
def test_streaming_in_cpp(artifact: Path, tmp_path: Path) -> None:
    import onnxruntime

    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler: install g++")
    folder = EXAMPLES / "streaming"
    library = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so*"))
    program = tmp_path / "stream"
    flags = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-O1")
    run(compiler, *flags, "stream.cpp", "-o", program, "-ldl", cwd=folder)
    printed = run(program, library, artifact, *TOKENS, cwd=tmp_path)
    assert [int(line) for line in printed.split()] == best_tokens(artifact)
    operators = cpu.find()
    if operators is not None:
        given = ("--operators", operators, library, artifact, *TOKENS)
        assert run(program, *given, cwd=tmp_path) == printed
    for wrong, said in BAD_MANIFESTS.items():
        (tmp_path / "manifest.json").write_text(wrong)
        command = [program, library, tmp_path, *TOKENS]
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
        assert done.returncode == 1 and said in done.stderr, (wrong, done.stderr)


@pytest.mark.services
def test_a_hybrid_streams_in_both(tmp_path: Path) -> None:
    """Its keys and values grow, its mask is of integers, and it takes a mask for the token."""
    import onnxruntime

    import linexport

    pytest.importorskip("transformers", reason="needs the hf extra")
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler: install g++")
    save_model(TINY["qwen3_next"], "qwen3_next", tmp_path / "model")
    artifact, program = tmp_path / "artifact", tmp_path / "stream"
    made = linexport.convert(tmp_path / "model", artifact, bench=False, threads=1).load()
    assert any(state.grows is not None for state in made.manifest.states)
    tokens = ["3", "1", "4", "1", "5", "9"]
    logits = made.run(np.array([[int(token) for token in tokens]]))["logits"][0]
    folder = EXAMPLES / "streaming"
    run(compiler, "-std=c++17", "stream.cpp", "-o", program, "-ldl", cwd=folder)
    library = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so*"))
    for command in ((program, library), (sys.executable, folder / "stream.py")):
        printed = run(*command, artifact, *tokens, cwd=tmp_path)
        assert [int(line) for line in printed.split()] == logits.argmax(-1).tolist()


@pytest.mark.services
def test_a_layer_of_vectors_streams_in_cpp(tmp_path: Path) -> None:
    import onnxruntime

    import linexport

    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler: install g++")
    library = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so*"))
    program, artifact = tmp_path / "stream", tmp_path / "artifact"
    run(compiler, "-std=c++17", "stream.cpp", "-o", program, "-ldl", cwd=EXAMPLES / "streaming")
    made = linexport.convert(
        Layer(), artifact, args=(torch.randn(2, 16, 8),), bench=False, threads=1
    ).load()
    rows = np.random.default_rng(0).standard_normal((1, 9, 8), np.float32)
    text = "\n".join(" ".join(map(str, row)) for row in rows[0])
    command = [str(program), str(library), str(artifact)]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = np.array([list(map(float, line.split())) for line in done.stdout.splitlines()])
    np.testing.assert_allclose(printed, made.run(rows)["output"][0], atol=1e-5)
    done = subprocess.run(command, input="1 2 3", capture_output=True, text=True)
    assert done.returncode == 1 and "expected 8 numbers for each step" in done.stderr
    done = subprocess.run([*command[:2], str(artifact / "no")], capture_output=True, text=True)
    assert done.returncode == 1 and "it cannot be read" in done.stderr


@pytest.mark.slow
def test_own_layer(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "linexport", "convert", "gated:build")
    printed = run(*command, "--output", tmp_path / "out", "--no-bench", cwd=EXAMPLES / "own_layer")
    assert "1 LinearAttention" in printed and "Streaming  ✓ passed" in printed


@pytest.mark.slow
def test_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the hf extra")
    printed = run(sys.executable, EXAMPLES / "hugging_face" / "hybrid.py", tmp_path, cwd=tmp_path)
    ours, theirs = (line.partition("[")[2] for line in printed.splitlines()[-2:])
    assert ours and ours == theirs


@pytest.mark.slow
def test_ci(tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLES / "ci", tmp_path / "project")
    run(sys.executable, "-m", "pytest", "-q", "tests/test_export.py", cwd=folder)
    workflow = (folder / "workflow.yml").read_text()
    assert "python -m pytest tests/test_export.py" in workflow
