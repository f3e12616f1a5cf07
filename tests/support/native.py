"""Models of few nodes on ONNX Runtime with the CPU library registered."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime as ort

from linexport.plugins.cpu import library
from tests.support.runtimes import Arrays


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
