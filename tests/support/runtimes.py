"""Runtimes on the CPU that run a model of few nodes: ONNX Runtime, and onnx's own evaluator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime as ort
from onnx import inliner
from onnx.reference import ReferenceEvaluator

Arrays = dict[str, np.ndarray]


def session(model: onnx.ModelProto, optimise: bool = True) -> ort.InferenceSession:
    """An ONNX Runtime CPU session on one thread."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def on_onnxruntime(model: onnx.ModelProto) -> Callable[[Arrays], list[np.ndarray]]:
    """Run a model on ONNX Runtime; half-precision arrays are fed as float32."""
    opened = session(model)
    return lambda arrays: opened.run(None, {n: _feed(x) for n, x in arrays.items()})


def on_reference(model: onnx.ModelProto) -> Callable[[Arrays], list[np.ndarray]]:
    """Run a model in onnx's own evaluator, in NumPy.

    The functions are inlined first: the evaluator wants every optional input spelled out.
    """
    evaluator = ReferenceEvaluator(inliner.inline_local_functions(model))
    return lambda arrays: evaluator.run(None, {n: _feed(x) for n, x in arrays.items()})


def _feed(x: np.ndarray) -> np.ndarray:
    return x if x.dtype == bool else x.astype(np.float32)
