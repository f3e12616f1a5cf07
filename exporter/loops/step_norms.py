"""Group norms of a Scan's step, as exporters write them -> layer norms of each group.

    Reshape(x, (0, G, -1)), InstanceNormalization, Reshape(.., Shape(x))
    ->    Reshape(x, (0, G, n)), LayerNormalization, Reshape(.., (0, C))

A layer norm is of each token alone, whatever dims are before it, so that it can leave the step.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.edit import producer
from linexport.graph.partial_eval import Values
from linexport.graph.tensors import known_shape


def as_layer_norms(body: gs.Graph, known: Values) -> bool:
    """Write the group norms of a body as layer norms; returns whether there were any.

    Args:
        body: of a Scan.
        known: values of the graph around it.
    """
    norms = [node for node in body.nodes if node.op == "InstanceNormalization"]
    return True in [_as_layer_norm(norm, known) for norm in norms]


def _as_layer_norm(norm: gs.Node, known: Values) -> bool:
    """Write one as a layer norm, where it is between two reshapes of known sizes."""
    grouped, *own = norm.inputs
    before = producer(grouped, "Reshape")
    after = norm.outputs[0].outputs[0] if len(norm.outputs[0].outputs) == 1 else None
    if before is None or after is None or after.op != "Reshape" or len(grouped.outputs) != 1:
        return False
    x, (scale, shift) = before.inputs[0], (known.numbers(t) for t in own)
    # An InstanceNormalization scales each group, a LayerNormalization each entry of one: they are
    # equal only with scale 1 and shift 0.
    if scale is None or shift is None or (scale != 1).any() or shift.any():
        return False
    rest = list(x.shape or ())[1:]
    sizes = [size for size in rest if isinstance(size, int)]
    back = producer(after.inputs[1], "Shape")
    # Shapes are written as constants, in which only the batch may be 0 for its own size.
    if not sizes or len(sizes) != len(rest) or back is None:
        return False
    groups = len(scale)
    if back.inputs[0] is not x or math.prod(sizes) % groups:
        return False
    width, name = math.prod(sizes) // groups, norm.outputs[0].name

    def constant(part: str, values: np.ndarray) -> gs.Constant:
        return gs.Constant(f"{name}/{part}", values)

    # Mean and variance over the n entries of a group are those over the last axis of (batch, G, n).
    before.inputs[1] = constant("groups", np.asarray([0, groups, width], np.int64))
    after.inputs[1] = constant("sizes", np.asarray([0, *sizes], np.int64))
    ones = np.ones(width, scale.dtype)
    norm.inputs = [grouped, constant("scale", ones), constant("shift", 0 * ones)]
    norm.op, norm.attrs = "LayerNormalization", {"axis": -1, **norm.attrs}
    batch = known_shape(x)[0]
    for tensor, shape in (
        (before.outputs[0], [batch, groups, width]),
        (norm.outputs[0], [batch, groups, width]),
        (after.outputs[0], [batch, *sizes]),
    ):
        tensor.dtype, tensor.shape = x.dtype, shape
    return True
