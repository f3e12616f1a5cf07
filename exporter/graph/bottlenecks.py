"""Values of a graph that everything after them is computed through, such as the residual stream.

A value v of node i is one where no other value that nodes up to i compute is read after i. What
follows from the inputs or from weights alone, as masks, rotary embeddings and transposed weights
do, is not counted: every part of a graph that is cut at v computes it again.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx

from linexport.graph.walk import reads
from linexport.plugins.ops.registry import known_shapes


def bottlenecks(model: onnx.ModelProto, weights: Collection[str], sequence: str) -> list[str]:
    """Return the bottlenecks that are sequences of vectors, in the order of the graph.

    Between two that follow one another is at least one node that reads a weight.

    Args:
        model: its nodes are in order.
        weights: names of initializers.
        sequence: name of the dimension of tokens, the second one of a bottleneck (B, T, C).
    """
    nodes = model.graph.node
    last_read: dict[str, int] = {}
    for index, node in enumerate(nodes):
        last_read |= dict.fromkeys(reads(node), index)
    stored = {tensor.name for tensor in model.graph.initializer}
    varying = {i.name for i in model.graph.input if i.name not in stored}
    read, shapes = set(weights), known_shapes(model)
    live: set[str] = set()
    found = []
    has_weight = False
    for index, node in enumerate(nodes):
        names = set(reads(node))
        if not names.isdisjoint(varying):
            varying.update(node.output)
            has_weight |= not names.isdisjoint(weights)
        if not names.isdisjoint(read):
            read.update(node.output)
        live.update(varying.intersection(node.output) & read)
        live = {name for name in live if last_read.get(name, -1) > index}
        if has_weight and len(live) == 1 and live <= set(node.output):
            [value] = live
            shape = shapes.get(value, ())
            if len(shape) == 3 and shape[1] == sequence:
                found.append(value)
                has_weight = False
    return found
