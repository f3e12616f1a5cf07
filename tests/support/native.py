"""Models of few nodes on ONNX Runtime with the CPU library registered."""

from __future__ import annotations

import os
import subprocess
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

SOURCES = Path(library.__file__).parent / "cpp"


def build(
    folder: Path, *flags: str, more: Sequence[Path] = (), name: str = "liblinexport_cpu.so"
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
        ["g++", *common, *flags, digest, *map(str, sources), "-o", str(made)], check=True
    )
    return made


def session(model: onnx.ModelProto, threads: int = 1) -> ort.InferenceSession:
    """A session whose linexport nodes are the library's; one that it cannot run is an error."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.add_session_config_entry(library.THREADS, str(threads))
    file = os.environ.get("LINEXPORT_TEST_LIBRARY")  # one that was built with sanitizers
    options.register_custom_ops_library(file or str(library.path()))
    bare = onnx.ModelProto()
    bare.CopyFrom(model)
    del bare.functions[:]  # so that nothing but the library can run a node
    return ort.InferenceSession(bare.SerializeToString(), options, ["CPUExecutionProvider"])


def on_library(model: onnx.ModelProto, threads: int = 1) -> Callable[[Arrays], list[np.ndarray]]:
    """Run a model of linexport nodes by the library."""
    opened = session(model, threads)
    return lambda arrays: opened.run(None, arrays)


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
        type_ = TensorProto.BOOL if formal.type_str == "tensor(bool)" else wide
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
