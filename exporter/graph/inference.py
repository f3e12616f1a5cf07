"""Inference of the types and shapes of one node's outputs, by onnx."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import TypeProto, helper, numpy_helper
from onnx_graphsurgeon.exporters.onnx_exporter import OnnxExporter

from linexport.graph.dims import Shape

MAX_SIZES = 64
"""Elements of a constant that may hold sizes or axes."""


def inferred_outputs(
    node: gs.Node, shapes: Mapping[str, Shape] | None = None
) -> Mapping[str, TypeProto] | None:
    """Return the types and shapes that onnx infers for the outputs of a node; None if not.

    Args:
        node: of a standard operator.
        shapes: of inputs, by name, in place of their own.
    """
    types, data = {}, {}
    for tensor in node.inputs:
        if tensor.is_empty():
            continue
        if tensor.dtype is None:
            return None
        own = tensor.dtype
        kind = own if isinstance(own, int) else helper.np_dtype_to_tensor_dtype(np.dtype(own))
        shape = (shapes or {}).get(tensor.name) or tensor.shape
        types[tensor.name] = helper.make_tensor_type_proto(kind, shape)
        # Sizes and axes decide shapes; the numbers of a weight do not, and are not copied.
        if isinstance(tensor, gs.Constant) and np.prod(tensor.shape) <= MAX_SIZES:
            data[tensor.name] = numpy_helper.from_array(np.asarray(tensor.values), tensor.name)
    schema, proto = onnx.defs.get_schema(node.op), OnnxExporter.export_node(node)
    try:
        found: Mapping[str, TypeProto] = onnx.shape_inference.infer_node_outputs(
            schema, proto, types, data
        )
    except onnx.shape_inference.InferenceError:
        return None
    return found
