"""Models of few nodes on ONNX Runtime with the CPU library registered."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from linexport.plugins.cpu import library
from linexport.plugins.ops.registry import all_ops, attach_functions
from tests.support.layouts import one_op_model
from tests.support.runtimes import Arrays
from tests.support.sessions import RemoteSession, open_session, run_in_place

SOURCES = Path(library.__file__).parent / "cpp"
TESTS = Path(__file__).parents[1] / "cpu"
OTHERS = {
    *("test_sanitizers.py", "test_compilers.py", "test_threads.py", "test_allocations.py"),
    *("test_library.py", "test_bad_input.py", "test_proven.py", "test_old_runtimes.py"),
    "test_exponentials.py",
}
"""Tests of builds, of the file, of sessions and of artifacts; those of operators are the rest."""

OTHER_TYPES = {"tensor(bool)": TensorProto.BOOL, "tensor(int64)": TensorProto.INT64}
"""Types of inputs that are no activations, by their name in a schema."""


def build(
    folder: Path,
    *flags: str,
    more: Sequence[Path] = (),
    name: str = "liblinexport_cpu.so",
    compiler: str = "g++",
) -> Path:
    """The library with these flags and ``more`` sources in ``folder``; not named .so, a program."""
    made = folder / name
    common = [
        "-std=c++17",
        "-O1",
        "-g",
        "-fPIC",
        "-ffp-contract=fast",
        "-Wno-psabi",
        f"-I{SOURCES}",
    ]
    common += ["-shared"] if made.suffix == ".so" else ["-pthread"]
    digest = f'-DLINEXPORT_SOURCES="{library.sources_digest()}"'
    sources = [*sorted(SOURCES.glob("*.cc")), *more]
    subprocess.run(
        [compiler, *common, *flags, digest, *map(str, sources), "-o", str(made)], check=True
    )
    return made


def session(model: onnx.ModelProto, threads: int = 1) -> ort.InferenceSession:
    """A session whose linexport nodes are the library's; one that it cannot run is an error.

    In the environment, LINEXPORT_TEST_LIBRARY names another build of the library, and
    LINEXPORT_TEST_PYTHON a Python of another architecture that the session is to be in.
    """
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.functions[:]  # so that nothing but the library can run a node
    content = bare.SerializeToString()
    file = os.environ.get("LINEXPORT_TEST_LIBRARY") or str(library.path())
    python = os.environ.get("LINEXPORT_TEST_PYTHON")
    if python:
        return RemoteSession(python, file, content, threads)
    return open_session(content, file, threads)


def on_library(model: onnx.ModelProto, threads: int = 1) -> Callable[[Arrays], list[np.ndarray]]:
    """Run a model of linexport nodes by the library."""
    opened = session(model, threads)
    return lambda arrays: opened.run(None, arrays)


def check_in_place(model: onnx.ModelProto, arrays: Arrays, threads: int = 1) -> None:
    """The same outputs where states are written to the memory they are read from."""
    opened = session(model, threads)
    want = opened.run(None, arrays)
    for one, two in zip(run_in_place(opened, arrays), want, strict=True):
        np.testing.assert_array_equal(one, two)


def run_operator_tests(environment: Mapping[str, str]) -> str:
    """Run the tests of all operators in a process with this environment; return what they print."""
    tests = [str(path) for path in sorted(TESTS.glob("test_*.py")) if path.name not in OTHERS]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    command += ["-m", "not slow"]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=3000
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def one_node(
    op: str,
    shapes: Mapping[str, Sequence[int | str]],
    outputs: Sequence[str],
    kind: int = TensorProto.FLOAT,
    **attributes: Any,
) -> onnx.ModelProto:
    """One linexport node with inputs of these shapes and these outputs, its function attached.

    ``kind`` is the type of its activations. Cast nodes stand between, as NumPy has no bfloat16 to
    feed a runtime with: graph inputs and outputs are float32.
    """
    schema = all_ops()[op].schema
    wide = TensorProto.FLOAT
    nodes, feeds, infos, names = [], [], [], []
    for formal in schema.inputs:
        name = formal.name if formal.name in shapes else ""
        names.append(name)
        if not name:
            continue
        type_ = OTHER_TYPES.get(formal.type_str, wide)
        feeds.append(helper.make_tensor_value_info(name, type_, shapes[name]))
        if formal.type_str == "T" and kind != wide:
            names[-1] = f"{name}_cast"
            nodes.append(helper.make_node("Cast", [name], [names[-1]], to=kind))
            infos.append(helper.make_tensor_value_info(names[-1], kind, shapes[name]))
    results = [f"own_{f.name}" if f.name in outputs else "" for f in schema.outputs]
    nodes.append(helper.make_node(op, names, results, domain="linexport", **attributes))
    nodes += [helper.make_node("Cast", [f"own_{n}"], [n], to=wide) for n in outputs]
    ends = [helper.make_tensor_value_info(n, wide, None) for n in outputs]
    model = one_op_model(nodes, feeds, ends, infos)
    attach_functions(model)
    return model
