"""Squeezes of a dimension that varies, which torch traces as no change, and ONNX would reject.

    squeeze(x, 0) of x (batch, ...)    ->    x

For torch, a size that varies is not 1: the result has as many dimensions as x.
"""

from __future__ import annotations

import torch
from torch.fx import Node

aten = torch.ops.aten

SQUEEZES = frozenset((aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default))


def remove_idle_squeezes(program: torch.export.ExportedProgram) -> None:
    """Remove squeezes whose result has as many dimensions as their input, in place."""
    graph, found = program.graph, False
    for node in list(graph.nodes):
        source = node.args[0] if node.target in SQUEEZES else None
        if isinstance(source, Node) and source.meta["val"].dim() == node.meta["val"].dim():
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            found = True
    if found:
        program.graph_module.recompile()
