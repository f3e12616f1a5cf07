"""Transpose of a Transpose -> one Transpose, or none; and the Reshapes around it, likewise.

What is replaced in the middle of a graph takes tokens before heads, and users' attention often has
heads before tokens: where a feature map that stood between is now the attention's own, what is left
changes the layout back and forth.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from linexport.passes.simplify import merge_reshapes, passed_on, replace

STAGE = "tidy"


def run(graph: gs.Graph) -> None:
    """One sweep in the order of evaluation."""
    graph.toposort()
    outputs = {id(tensor) for tensor in graph.outputs}
    for node in list(graph.nodes):
        if node.op not in ("Transpose", "Reshape") or id(node.outputs[0]) in outputs:
            continue
        if node.op == "Reshape":
            merge_reshapes(node)
            source = passed_on(node)
        else:
            source = _merge_transposes(node)
        if source is not None:
            replace(node, [source])


def _merge_transposes(node: gs.Node) -> gs.Tensor | None:
    """Let it read what the Transpose before it read; that value itself, where nothing changes."""
    before = node.inputs[0].inputs[0] if node.inputs[0].inputs else None
    if before is None or before.op != "Transpose":
        return None
    if "perm" not in before.attrs or "perm" not in node.attrs:
        return None  # an exporter writes it, and so do we
    source = before.inputs[0]
    perm = [before.attrs["perm"][axis] for axis in node.attrs["perm"]]
    if perm == sorted(perm):
        return source
    node.inputs[0], node.attrs["perm"] = source, perm
    return None
