"""Whole quotients of sizes that may be negative, rounded down as Python rounds them.

    (h - 2 * w) // 2     ->     (h - 2 * w - (h - 2 * w) % 2) // 2
    -(-t // 64)          ->     -((-t - -t % 64) // 64)

torch's exporter writes ONNX's Div, which rounds towards zero. ONNX's Mod has the sign of the
divisor, as Python's has.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from linexport.system.torch_internals.sizes import may_be_negative


def write_whole(program: torch.export.ExportedProgram) -> None:
    """Subtract remainders in front of such divisions, in place."""
    graph, found = program.graph, False
    for node in graph.nodes:
        dividend = node.args[0] if node.target is operator.floordiv else None
        if not isinstance(dividend, Node) or not may_be_negative(dividend.meta["val"]):
            continue
        size, divisor = dividend.meta["val"], node.args[1]
        by = divisor.meta["val"] if isinstance(divisor, Node) else divisor
        with graph.inserting_before(node):
            rest = graph.call_function(operator.mod, (dividend, divisor))
            whole = graph.call_function(operator.sub, (dividend, rest))
        rest.meta, whole.meta = (
            {**node.meta, "val": size % by},
            {**node.meta, "val": size - size % by},
        )
        node.args, found = (whole, divisor), True
    if found:
        program.graph_module.recompile()
