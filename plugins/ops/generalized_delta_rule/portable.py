"""The lowerings of GeneralizedDeltaRule: chunks of tokens, and few tokens one by one."""

from __future__ import annotations

from linexport.plugins.ops.body import Body, ceil_div
from linexport.plugins.ops.generalized_delta_rule import blocks, tokens
from linexport.plugins.ops.generalized_delta_rule.definition import view
from linexport.plugins.ops.generalized_delta_rule.operands import operands
from linexport.plugins.ops.op import Node

FEW = 8
"""Tokens up to which they are taken one by one: a chunk costs as much as so many of them."""


def portable(node: Node) -> tuple[Body, list[str]]:
    """Write a Scan over tokens for 1 ... ``FEW`` of them, the chunk form for others."""
    return _write(node, at_once=True)


def by_blocks(node: Node) -> tuple[Body, list[str]]:
    """Write the same with chunks in blocks, in a Scan that has a Scan in it.

    For processors with caches. TensorRT-RTX 1.7 builds no such engine.
    """
    return _write(node, at_once=False)


def _write(node: Node, at_once: bool) -> tuple[Body, list[str]]:
    sizes, b = view(node), Body()
    x = operands(b, node, sizes)
    few, many = Body(b), Body(b)
    output, S = b.If(
        b.Squeeze(b.Equal(ceil_div(b, x.length, FEW), b.const([1])), b.const([0])),
        outputs=2,
        then_branch=few.subgraph("few", [], tokens.write(few, x, sizes)),
        else_branch=many.subgraph("many", [], blocks.write(many, x, sizes, at_once)),
    )
    return b, [b.CastLike(output, node.inputs[0]), S]
