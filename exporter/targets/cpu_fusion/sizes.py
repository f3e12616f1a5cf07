"""Sizes of a Reshape as constants, where the shapes that the file states say what they are.

    Reshape(x, Concat(batch, length, 8, 64))  ->  Reshape(x, [0, 0, 8, 64])

Exported graphs compute them from shapes of inputs, in a handful of nodes for each Reshape.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import numpy_helper

from linexport.plugins.ops.registry import known_shapes
from linexport.plugins.ops.shapes import Dim

COPIED, INFERRED = 0, -1
"""Sizes that a Reshape takes from its input: that of the same axis, and what is left."""


def with_constant_sizes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with constant sizes, itself where it computes none that could be constant.

    Nodes that computed them stay, whether or not something else reads them.
    """
    shapes, constants = known_shapes(model), {t.name for t in model.graph.initializer}
    found = {}
    for index, node in enumerate(model.graph.node):
        if node.domain or node.op_type != "Reshape" or node.input[1] in constants:
            continue
        before, after = shapes.get(node.input[0]), shapes.get(node.output[0])
        sizes = before is not None and after is not None and constant_sizes(before, after)
        if sizes:
            found[index] = sizes
    if not found:
        return model
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for index, sizes in found.items():
        node = made.graph.node[index]
        node.input[1] = f"{node.output[0]}/sizes"
        del node.attribute[:]  # with allowzero=1 a size of zero would not be copied
        made.graph.initializer.append(numpy_helper.from_array(np.array(sizes), node.input[1]))
    return made


def constant_sizes(before: Sequence[Dim], after: Sequence[Dim]) -> list[int] | None:
    """Return sizes that a Reshape can have instead of those it computes; None where it has none.

    Args:
        before: shape of its input.
        after: shape of its output.
    """
    sizes = []
    for axis, size in enumerate(after):
        if isinstance(size, int):
            sizes.append(size)
        else:
            same = size is not None and axis < len(before) and before[axis] == size
            sizes.append(COPIED if same else INFERRED)
    # What is left of no elements is not known: of the sizes that are copied next to it none may be
    # zero, as a batch is not, and the tokens of a call can be.
    copied = [axis for axis, size in enumerate(sizes) if size == COPIED]
    inferred = sizes.count(INFERRED)
    return None if 0 in after or inferred > 1 or (inferred and copied not in ([], [0])) else sizes
