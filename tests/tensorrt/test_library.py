"""The C++ library: advice where headers are missing; with them, engines are built with it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

import linexport
from linexport.errors import BuildError, EnvironmentProblemError
from linexport.plugins.kernels.contract import LAYER
from linexport.plugins.ops.registry import all_ops
from linexport.plugins.tensorrt import library
from tests.support import ROOT, SCRIPTS, families, tensorrt_headers, tensorrt_models


def test_every_op_that_has_kernels_has_a_creator_in_the_library() -> None:
    """Plugins in Python are made from the registry, those in C++ are named."""
    source = (library.SOURCES / "plugin.cpp").read_text(encoding="utf-8")
    named = set(re.findall(r'\w+\{"(\w+)"\}', source[source.index("getCreators") :]))
    assert named == {LAYER, *(op.name for op in all_ops().values() if op.kernels)}


def test_the_single_source_of_prepared_folders_compiles(tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "plugins.cpp"
    source.write_text(library.single_source(), encoding="utf-8")
    command = ["c++", "-std=c++17", "-fsyntax-only", "-isystem", str(ROOT / "tools/gpu/tensorrt")]
    subprocess.run([*command, str(source)], check=True)


def test_missing_headers_end_with_advice(cli: Callable[..., Any], tmp_path: Path) -> None:
    done = cli("plugins", "build", "--include", tmp_path, "--output", tmp_path / "x.so")
    assert done.code == 5
    assert "NvInferRuntime.h was not found" in done.err and "--include FOLDER" in done.err
    assert not (tmp_path / "x.so").exists()


def test_code_that_does_not_compile_is_a_build_error(tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("CMake is not installed")
    for name in ("NvInferRuntime.h", "cuda.h"):
        (tmp_path / name).write_text("#error these are not the headers\n")
    with pytest.raises(BuildError, match="not the headers"):
        library.build_library(tmp_path / "x.so", tmp_path, tmp_path)
    assert not (tmp_path / "x.so").exists()


def test_a_machine_without_cmake_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("NvInferRuntime.h", "cuda.h"):
        (tmp_path / name).touch()
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    with pytest.raises(EnvironmentProblemError, match="pip install cmake"):
        library.build_library(tmp_path / "x.so", tmp_path, tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, compiled with the first headers that are at hand."""
    output = tmp_path_factory.mktemp("library") / library.NAME
    return library.build_library(output, tensorrt_headers.folders()[0])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["linear", "gated_delta", "convolution", "feature_map"])
def test_the_library_builds_the_engines_that_python_builds(
    case: str, rtx: Any, engines: SimpleNamespace, made: Path, tmp_path: Path
) -> None:
    """Plugin layers and scratch memory, which the plugin computes, are the same."""
    model = {
        "convolution": tensorrt_models.convolution,
        "feature_map": tensorrt_models.feature_map,
    }.get(case, lambda: tensorrt_models.node(rule=case, normalize=case == "linear"))()
    low, _ = engines.lowered(model)
    path = tmp_path / "model.onnx"
    onnx.save_model(low, str(path))
    said = engine_of(path, made)
    names = {"convolution": "conv", "feature_map": "map"}
    assert said.startswith(f"('{names.get(case, 'attention')}',)")


@pytest.mark.slow
@pytest.mark.parametrize("case", [LAYER, "StabilizedExp"])
def test_it_builds_those_of_converted_models(
    case: str, rtx: Any, made: Path, tmp_path: Path
) -> None:
    """The plugins that only passes write: attention with its operands, and exponents."""
    source: Any = "reference_models:stabilised"
    if case == LAYER:
        source, kind = tmp_path / "model", "qwen3_5_text"
        linear = {"layer_types": ["linear_attention"] * 2}
        families.save_model({**families.TINY[kind], **linear}, kind, source)
    options = {"target": "tensorrt-rtx", "sms": (89,), "dims": ("seq=1:64:4096",), "bench": False}
    (engine,) = linexport.convert(source, tmp_path / "artifact", threads=1, **options).engines
    model = tmp_path / "artifact" / "model.onnx"
    assert case in {node.op_type for node in onnx.load_model(str(model)).graph.node}
    assert engine_of(model, made).startswith(str(tuple(engine.plugins)))


def engine_of(model: Path, made: Path) -> str:
    """What an engine holds, which is the same by the library's plugins and by Python's."""
    said = []
    for registered in ("python", str(made)):
        done = subprocess.run(
            [sys.executable, str(SCRIPTS / "build_engine.py"), str(model), registered],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1]
    return said[0]
