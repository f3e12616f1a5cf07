"""The values of one node whose inputs are constant: by onnx's reference, or by ONNX Runtime.

Where NumPy has a function for an operator, onnx's reference is that function: it rounds less than
the kernels of ONNX Runtime, and is faster for one node. Of the others the reference lacks some
versions (DequantizeLinear before 19) and is wrong for some (indices of MaxPool, LRN, what overflows
in QuantizeLinear), so ONNX Runtime computes them as it does where the file is run. Each takes what
the other refuses; a node that neither evaluates has no known value.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter

log = logging.getLogger(__name__)

Evaluator = Callable[[onnx.ModelProto, Mapping[str, np.ndarray]], list[Any]]

BY_NUMPY = {
    *(
        "Abs",
        "Add",
        "And",
        "Cast",
        "CastLike",
        "Ceil",
        "Concat",
        "ConstantOfShape",
        "Cos",
        "CumSum",
    ),
    *("DFT", "Div", "Einsum", "Equal", "Erf", "Exp", "Expand", "Flatten", "Floor", "Gather"),
    *("GatherElements", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Log"),
    *("MatMul", "Max", "Min", "Mul", "Neg", "Not", "Or", "Pow", "Range", "Reciprocal", "ReduceMax"),
    *("ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "Relu", "Reshape", "ScatterElements"),
    *("Shape", "Sigmoid", "Sign", "Sin", "Size", "Slice", "Softmax", "Softplus", "Split", "Sqrt"),
    *("Squeeze", "Sub", "Sum", "Tanh", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where"),
}
"""Operators that the reference computes by NumPy's function for them."""

ENDS_THE_PROCESS = {"Einsum"}
"""Operators that ONNX Runtime does not refuse but crashes on, where they contradict themselves."""

IR_VERSION = 10
"""IR version of a model of one operator: the default of onnx may be too new for ONNX Runtime."""


def evaluate(node: gs.Node, constants: Sequence[gs.Constant], opset: int) -> list[Any] | None:
    """Return the outputs of a node: arrays or numbers, and lists for sequences.

    Args:
        node: of the standard operators.
        constants: its inputs, or others of their names in their place.
        opset: of the model.

    Returns:
        None where nothing here evaluates the node.
    """
    given = {tensor.name: np.asarray(tensor.values) for tensor in constants}
    for evaluator in _evaluators(node.op):
        try:
            return evaluator(_model(OnnxExporter.export_node(node), given, opset), given)
        except Exception as error:  # neither has a common error
            log.debug("%s of %s %r: %s", evaluator.__name__, node.op, node.name, error)
    return None


def _evaluators(op: str) -> Sequence[Evaluator]:
    if op in ENDS_THE_PROCESS:
        return (_by_reference,)
    both: tuple[Evaluator, ...] = (_by_reference, _by_onnx_runtime)
    return both if op in BY_NUMPY else both[::-1]


def _model(node: onnx.NodeProto, given: Mapping[str, np.ndarray], opset: int) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for name, v in given.items()
    ]
    outputs = [helper.make_value_info(name, onnx.TypeProto()) for name in node.output]
    graph = helper.make_graph([node], "alone", inputs, outputs)
    imports = [helper.make_opsetid("", opset)]
    return helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION)


def _by_reference(model: onnx.ModelProto, given: Mapping[str, np.ndarray]) -> list[object]:
    return list(ReferenceEvaluator(model).run(None, dict(given)))


def _by_onnx_runtime(model: onnx.ModelProto, given: Mapping[str, np.ndarray]) -> list[object]:
    """Run a model of one node; its inputs become initializers, which may be of any type."""
    del model.graph.input[:]
    model.graph.initializer.extend(numpy_helper.from_array(v, name) for name, v in given.items())
    kept = [value for value in model.graph.output if value.name]
    del model.graph.output[:]
    model.graph.output.extend(kept)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    values = dict(zip((o.name for o in session.get_outputs()), session.run(None, {}), strict=True))
    return [values.get(name) for name in model.graph.node[0].output]
