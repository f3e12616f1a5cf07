"""Cast integer operands of mixed operators to float, since torch's exporter does not.

    1.5 - n                       ->        1.5 - float(n)
    x.clamp(min=1, max=5e4)       ->        x.clamp(min=1.0, max=5e4)

torch promotes them so when it runs; its exporter finds no ``aten.sub`` of a number and a tensor,
and no ``aten.clamp`` of bounds of two types.
"""

from __future__ import annotations

import torch

SUBTRACTED = (torch.ops.aten.rsub.Scalar, torch.ops.aten.rsub.Tensor)


def promote(program: torch.export.ExportedProgram) -> None:
    """Promote integers that are subtracted from numbers, and integer bounds, in place."""
    graph = program.graph
    for node in graph.nodes:
        if node.target is torch.ops.aten.clamp.default:
            _promote_bounds(node)
        result = node.meta.get("val")
        given = node.args[0].meta.get("val") if node.target in SUBTRACTED else None
        if given is None or result is None or given.dtype == result.dtype:
            continue
        with graph.inserting_before(node):
            dtype = result.dtype
            floats = graph.call_function(
                torch.ops.aten._to_copy.default, (node.args[0],), {"dtype": dtype}
            )
        floats.meta = {**node.args[0].meta, "val": given.to(dtype)}
        node.args = (floats, *node.args[1:])
    program.graph_module.recompile()


def _promote_bounds(node: torch.fx.Node) -> None:
    """Let bounds of two types both be floats."""
    bounds = [*node.args[1:], *node.kwargs.values()]
    if {type(x) for x in bounds} == {int, float}:
        node.args = (node.args[0], *(float(x) if type(x) is int else x for x in node.args[1:]))
        node.kwargs = {k: float(x) if type(x) is int else x for k, x in node.kwargs.items()}
