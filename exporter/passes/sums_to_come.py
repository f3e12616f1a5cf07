"""ReduceSum(x) - CumSum(x) of integers -> CumSum(x, exclusive, reverse): what is still to come.

PyTorch has no sum from the end. For integers both forms give the same result. For floats the
rounding differs, and the difference is left as it is. ``token_flow`` proves that a sum from the end
turns the state of a recurrence; it cannot prove that of a difference.
"""

from __future__ import annotations

import logging

import onnx_graphsurgeon as gs
from onnx import TensorProto

from linexport.graph.contract import Pass, PassResult, rewrite_matches
from linexport.graph.edit import element_type_of, producer
from linexport.graph.tensors import constant_values, known_shape

log = logging.getLogger(__name__)

INTEGERS = {TensorProto.INT32, TensorProto.INT64, TensorProto.UINT32, TensorProto.UINT64}
"""Types of integers that CumSum takes."""


def run(graph: gs.Graph) -> PassResult:
    """Rewrite every such difference."""
    return rewrite_matches(graph, _running, _reverse, log)


def _running(graph: gs.Graph, node: gs.Node) -> gs.Node | None:
    """Return the CumSum that a node subtracts from the whole sum."""
    if node.op != "Sub" or node.domain or not node.inputs:  # disconnected by another pass
        return None
    whole, running = producer(node.inputs[0], "ReduceSum"), producer(node.inputs[1], "CumSum")
    if whole is None or running is None or whole.inputs[0] is not running.inputs[0]:
        return None
    x = running.inputs[0]
    if element_type_of(x) not in INTEGERS or x.shape is None:
        return None
    if any(running.attrs.get(name, 0) for name in ("exclusive", "reverse")):
        return None
    same = _axis(whole, x) == _axis(running, x) is not None
    return running if same and whole.attrs.get("keepdims", 1) else None


def _axis(node: gs.Node, x: gs.Tensor) -> int | None:
    """Return the one stored axis that a node sums along."""
    stored = constant_values(node.inputs[1]) if len(node.inputs) > 1 else None
    if stored is None or stored.size != 1:
        return None
    return int(stored.item()) % len(known_shape(x))


def _reverse(graph: gs.Graph, node: gs.Node, running: gs.Node) -> None:
    node.op, node.inputs = "CumSum", list(running.inputs)
    node.attrs = {"exclusive": 1, "reverse": 1}


PASS = Pass(
    name="sums_to_come",
    stage="canonicalise",
    ensures="no running sum of integers is subtracted from the sum of all of them",
    run=run,
)
