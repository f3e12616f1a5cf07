"""Transpose of a Transpose -> one Transpose, or none; and the Reshapes around it, likewise.

A fused node takes tokens before heads, and users' attention often has heads before tokens: where a
feature map that stood between is now the attention's own, what is left changes the layout back and
forth.
"""

from __future__ import annotations

import logging

import onnx_graphsurgeon as gs

from linexport.graph.contract import Pass, PassResult
from linexport.graph.edit import (
    identity_of,
    is_output,
    merge_reshapes,
    producer,
    replace_all_uses_with,
)

log = logging.getLogger(__name__)


def run(graph: gs.Graph) -> PassResult:
    """Fold in one sweep in the order of evaluation."""
    graph.toposort()
    modified = False
    for node in list(graph.nodes):
        if node.op not in ("Transpose", "Reshape"):
            continue
        if is_output(graph, node.outputs[0]):
            if producer(node.inputs[0], node.op):
                log.debug("%s %r is left as it is: it computes an output", node.op, node.name)
            continue
        if node.op == "Reshape":
            modified |= merge_reshapes(node)
            source = identity_of(node)
        else:
            merged = _merge_transposes(node)
            modified |= merged
            perm = node.attrs.get("perm")
            straight = perm is not None and perm == sorted(perm)
            source = node.inputs[0] if merged and straight else None
        if source is not None:
            replace_all_uses_with(node, [source])
            modified = True
    return PassResult(modified)


def _merge_transposes(node: gs.Node) -> bool:
    """Let a Transpose read what the one before it reads; returns whether it does now."""
    before = producer(node.inputs[0], "Transpose")
    # Without ``perm`` the axes are reversed; exporters write it, and so do we.
    if before is None or "perm" not in before.attrs or "perm" not in node.attrs:
        return False
    node.attrs["perm"] = [before.attrs["perm"][axis] for axis in node.attrs["perm"]]
    node.inputs[0] = before.inputs[0]
    return True


PASS = Pass(
    name="fold_transposes",
    stage="tidy",
    ensures="no Transpose reads a Transpose, and no Reshape a Reshape, except for graph outputs",
    run=run,
)
