"""Branches of ``torch.cond`` that give or take views, which torch does not export.

    cond(p, f, g, (x, x.mT)), f(x, y) = y    ->    cond(p, f, g, (copy(x), copy(x.mT))), f = copy(y)

torch's export takes ``.mT`` of a branch out in front of it, where it is a view of another operand.
In ONNX, where values do not change, a copy is an Identity.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from linexport.system.torch_internals.trees import pytree

CLONE = torch.ops.aten.clone.default


def separate(program: torch.export.ExportedProgram) -> None:
    """Copy what branches take and give, in place."""
    _separate(program.graph_module)


def _separate(module: GraphModule) -> None:
    conditions = [n for n in module.graph.nodes if n.target is torch.ops.higher_order.cond]
    for node in conditions:
        condition, *branches, operands = node.args
        for branch in branches:
            inner = getattr(module, branch.target)
            _separate(inner)
            output = next(n for n in inner.graph.nodes if n.op == "output")
            output.args = _copied(inner.graph, output, output.args)
            inner.recompile()
        node.args = (condition, *branches, _copied(module.graph, node, operands))
    if conditions:
        module.recompile()


def _copied(graph: Graph, before: Node, values: object) -> object:
    """Return nested values, of which tensors are copied in front of a node."""

    def copy(value: Node) -> Node:
        if not isinstance(value.meta.get("val"), torch.Tensor):
            return value
        with graph.inserting_before(before):
            made = graph.call_function(CLONE, (value,))
        made.meta = {**value.meta}
        return made

    return pytree.tree_map_only(Node, copy, values)
