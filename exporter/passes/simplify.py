"""A graph written out at length by an exporter -> the same values by fewer nodes.

    nodes whose inputs are all constant           -> a constant
    Shape, and Gather or Slice of it, where all
    sizes that are taken are known                -> a constant
    Identity, Slice of everything, Concat of one value, products and quotients with 1,
    Cast, CastLike and Reshape to what it is      -> their input
    Reshape of a Reshape                          -> one Reshape
    CastLike a value of a known type              -> Cast, which reads no other value
    nodes that compute what another computes      -> that other node

Values stay the same to the bit: no constant is taken to be negligible, whatever its size.
onnxscript and onnx_ir have passes for each of these; here they are one sweep, because each makes
work for the next, and one that is made again after linear attention was fused.

Among the constants are the transposes torch multiplies by. Runtimes that fold them themselves may
do so after having fused them into the product, which then packs the weight again at every call. A
weight that others read as it is, such as a tied embedding, is left alone: it would be stored twice.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

import onnx_graphsurgeon as gs

from linexport.graph.contract import Pass, PassResult
from linexport.graph.edit import (
    identity_of,
    is_output,
    merge_reshapes,
    name_type,
    replace_all_uses_with,
)
from linexport.graph.folding import fold, is_readable, nbytes
from linexport.graph.operators import NOT_A_FUNCTION

log = logging.getLogger(__name__)

SEQUENCES = {"SplitToSequence", "SequenceConstruct", "SequenceInsert", "SequenceErase"}
"""Operators whose output is not a tensor."""

COMPARED = 256
"""Bytes: constants up to this size are equal if their values are, larger ones if they are one."""


def run(graph: gs.Graph) -> PassResult:
    """Sweep once in the order of evaluation: a node's inputs are simplified before it is."""
    graph.toposort()
    computed: dict[Hashable, Sequence[gs.Tensor]] = {}
    modified = False
    for node in list(graph.nodes):
        if _must_stay(graph, node):
            continue
        if node.op == "Reshape":
            modified |= merge_reshapes(node)
        modified |= name_type(node)
        values = _simpler(node, graph.opset, computed)
        if values is not None:
            log.debug("%s %r becomes %s", node.op, node.name, values[0].name if values else "none")
            replace_all_uses_with(node, values)
            modified = True
    return PassResult(modified)


def _must_stay(graph: gs.Graph, node: gs.Node) -> bool:
    if node.op in NOT_A_FUNCTION | SEQUENCES:
        return True
    has_subgraph = any(isinstance(value, gs.Graph) for value in node.attrs.values())
    return has_subgraph or any(is_output(graph, tensor) for tensor in node.outputs)


def _simpler(
    node: gs.Node, opset: int, computed: dict[Hashable, Sequence[gs.Tensor]]
) -> Sequence[gs.Tensor] | None:
    """Return values equal to a node's outputs; None where there are none.

    ``computed`` has the outputs of the nodes before it, by ``_key``, and is added to.
    """
    source = identity_of(node)
    if source is not None:
        return [source]
    key = _key(node)
    if key in computed:
        return computed[key]
    folded = fold(node, opset)
    computed[key] = folded or list(node.outputs)
    return folded


def _key(node: gs.Node) -> Hashable:
    """Return a key that is equal for nodes that compute the same."""
    inputs = tuple(_value_key(tensor) for tensor in node.inputs)
    attributes = tuple(sorted((name, _attribute_key(v)) for name, v in node.attrs.items()))
    used = tuple(tensor.is_empty() for tensor in node.outputs)
    return node.domain or "", node.op, inputs, attributes, used


def _value_key(tensor: gs.Tensor) -> Hashable:
    if isinstance(tensor, gs.Constant) and is_readable(tensor) and nbytes(tensor) <= COMPARED:
        return str(tensor.values.dtype), tensor.values.shape, tensor.values.tobytes()
    return id(tensor) if not tensor.is_empty() else None


def _attribute_key(value: object) -> str:
    if isinstance(value, gs.Constant):
        return repr(_value_key(value))
    return repr(value)


PASS = Pass(
    name="simplify",
    stage="canonicalise",
    ensures="no node computes a constant, one of its inputs, or what another node computes",
    run=run,
)
