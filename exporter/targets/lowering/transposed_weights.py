"""Products with a stored matrix that is transposed first, as a tied head is, without the transpose.

    table (V, W), Transpose -> (W, V), MatMul(x, (W, V))   ->   FusedMatMul(x, table), transB

ONNX Runtime computes such a Transpose when it opens the model: a second copy of the table, which it
packs a third time. This is made of a model when it is opened; its file does not change. A matrix
inside of ``model.onnx`` is left as it is: those are small, and not listed when a graph is read.
"""

from __future__ import annotations

from collections import defaultdict

import onnx
from onnx import TensorProto, helper

from linexport.graph.walk import reads
from linexport.plugins.ops.body import MICROSOFT, import_microsoft

OP = "FusedMatMul"

SMALLEST = 2**20
"""Numbers of the smallest matrix that is worth it."""


def with_transposed_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model whose products read large stored matrices as they are stored.

    Args:
        model: its weights may be external. Returned as it is where it has no such product.
    """
    found = _transposes(model.graph)
    if not found:
        return model
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    tables = {graph.node[i].output[0]: graph.node[i].input[0] for i in found}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in tables:
            node.op_type, node.domain = OP, MICROSOFT
            node.input[1] = tables[node.input[1]]
            node.attribute.append(helper.make_attribute("transB", 1))
    for index in reversed(found):
        del graph.node[index]
    import_microsoft(changed)
    return changed


def _transposes(graph: onnx.GraphProto) -> list[int]:
    """Return the places of nodes that transpose a large matrix for products alone."""
    stored = {
        t.name
        for t in graph.initializer
        if t.data_type == TensorProto.FLOAT
        and len(t.dims) == 2
        and t.dims[0] * t.dims[1] >= SMALLEST
    } - {i.name for i in graph.input}
    readers = defaultdict[str, list[onnx.NodeProto]](list)
    for node in graph.node:
        for name in reads(node):
            readers[name].append(node)
    shown = {o.name for o in graph.output}
    return [
        index
        for index, node in enumerate(graph.node)
        if node.op_type == "Transpose"
        and not node.domain
        and all([*attribute.ints] == [1, 0] for attribute in node.attribute)
        and node.input[0] in stored
        and node.output[0] not in shown
        and all(_is_product(reader, node.output[0]) for reader in readers[node.output[0]])
    ]


def _is_product(node: onnx.NodeProto, name: str) -> bool:
    """Return whether a node multiplies by a matrix from the right, and only that."""
    plain = node.op_type == "MatMul" and not node.domain
    return plain and node.input[1] == name and node.input[0] != name
