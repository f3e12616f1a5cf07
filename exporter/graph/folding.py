"""Constant folding: a node whose outputs do not depend on the inputs -> constants.

    Constant, and nodes whose inputs are all constant                ->  their values
    Shape, and Gather or Slice of it, where all sizes taken are known ->  those sizes

Values are computed by ``evaluation`` and kept whatever their size: no constant is taken to be
negligible. A node that cannot be evaluated is kept, as is one that reads a type that
NumPy has no dtype for (float8, bfloat16): onnx-graphsurgeon keeps such values only if they are not
looked at. onnxscript's folding does the same on its own representation; converting a graph to it
and back would copy every weight.
"""

from __future__ import annotations

import logging

import numpy as np
import onnx_graphsurgeon as gs
from onnx import helper

from linexport.graph.edit import producer
from linexport.graph.evaluation import evaluate

log = logging.getLogger(__name__)

SMALL = 2**16
"""Bytes: a constant larger than this is folded only if it does not add to the size of the file."""


def nbytes(tensor: gs.Constant) -> int:
    """Return the size of a constant's values in NumPy, which need not be in memory."""
    kind = tensor.dtype
    dtype = helper.tensor_dtype_to_np_dtype(kind) if isinstance(kind, int) else np.dtype(kind)
    return int(np.prod(tensor.shape, dtype=np.int64)) * dtype.itemsize


def is_readable(tensor: gs.Constant) -> bool:
    """Return whether a constant's values can be read without changing the type it is written as.

    onnx-graphsurgeon has ONNX's number in place of a dtype where NumPy has none.
    """
    return not isinstance(tensor.dtype, int)


def fold(node: gs.Node, opset: int) -> list[gs.Constant] | None:
    """Return constants for a node's outputs; None where it has other inputs or the file would grow.

    A large weight that another node reads as it is, such as a tied embedding, is not folded: it
    would be stored twice.
    """
    sizes = _known_sizes(node, opset)
    if sizes is not None:
        return [gs.Constant(node.outputs[0].name, sizes)]
    if node.op == "Constant" and not node.domain:
        stored = stored_value(node)
        return None if stored is None else [gs.Constant(node.outputs[0].name, stored)]
    given = [tensor for tensor in node.inputs if not tensor.is_empty()]
    constants = [tensor for tensor in given if isinstance(tensor, gs.Constant)]
    if node.domain or not constants or len(constants) != len(given):
        return None
    if not all(map(is_readable, constants)):
        log.debug("%s %r is not folded: NumPy lacks the type of a constant", node.op, node.name)
        return None
    large = [tensor for tensor in constants if nbytes(tensor) > SMALL]
    if any(len(tensor.outputs) > 1 for tensor in large):
        log.debug("%s %r is not folded: others read its weight", node.op, node.name)
        return None
    values = evaluate(node, constants, opset)
    if values is None:
        log.debug("%s %r is not folded: it cannot be evaluated", node.op, node.name)
        return None
    if any(isinstance(value, list) for value in values):
        log.debug("%s %r is not folded: its value is a sequence", node.op, node.name)
        return None
    values = [np.asarray(value) for value in values]
    grown = sum(v.nbytes for v in values) - sum(map(nbytes, large))
    if grown > SMALL:
        log.debug("%s %r is not folded: the file would grow by %d", node.op, node.name, grown)
        return None
    return [
        gs.Constant(name, value)  # of a transpose, a view: the weight is in memory once
        for name, value in zip(_names(node), values, strict=True)
    ]


def stored_value(node: gs.Node) -> np.ndarray | None:
    """Return the value of a Constant node; None for text, and for a type that NumPy lacks."""
    for name, value in node.attrs.items():
        if name == "value" and is_readable(value):
            return np.asarray(value.values)
        if name in ("value_int", "value_ints"):
            return np.asarray(value, np.int64)
        if name in ("value_float", "value_floats"):
            return np.asarray(value, np.float32)
    return None


def _names(node: gs.Node) -> list[str]:
    """Name what a node's outputs become: W.T for a transposed weight W that nothing else reads.

    Users know their weights by name: those of products are listed where they are quantised, and
    named where they are not finite. With one reader, no other constant gets that name.
    """
    if node.op == "Transpose" and len(node.inputs[0].outputs) == 1:
        return [f"{node.inputs[0].name}.T"]
    return [output.name for output in node.outputs]


def _known_sizes(node: gs.Node, opset: int) -> np.ndarray | None:
    """Return the sizes that a node takes of a shape, if all of them are numbers."""
    if node.domain or node.op not in ("Shape", "Gather", "Slice"):
        return None
    shape = node if node.op == "Shape" else producer(node.inputs[0])
    if shape is None or shape.op != "Shape" or shape.inputs[0].shape is None:
        return None
    sizes = list(shape.inputs[0].shape)[shape.attrs.get("start", 0) : shape.attrs.get("end")]
    places = np.arange(len(sizes))
    if node is not shape:
        known = [t for t in node.inputs[1:] if isinstance(t, gs.Constant)]
        if len(known) != len(node.inputs) - 1:
            return None
        known.insert(0, gs.Constant(node.inputs[0].name, places))
        found = evaluate(node, known, opset)
        if found is None:
            return None
        places = np.asarray(found[0])
    taken = [sizes[place] for place in places.flat]
    if not all(isinstance(size, int) for size in taken):
        return None
    return np.asarray(taken, np.int64).reshape(places.shape)
