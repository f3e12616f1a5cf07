"""Operands of the portable lowerings: in float32, scaled and masked."""

from __future__ import annotations

from typing import NamedTuple

from onnx import TensorProto

from linexport.plugins.ops.body import Body
from linexport.plugins.ops.generalized_delta_rule.definition import DeltaRuleSizes
from linexport.plugins.ops.op import Node


class DeltaRuleOperands(NamedTuple):
    """The op's inputs (B, T, H * d) in float32, the scale in the query and the mask in the others.

    Attributes:
        query, key, value, decay, a, b: packed, as they are.
        state: (B, H, d_k, d_v), zeros where none is given.
        batch, length: B and T, tensors of one element.
    """

    query: str
    key: str
    value: str
    decay: str
    a: str
    b: str
    state: str
    batch: str
    length: str


def operands(b: Body, node: Node, sizes: DeltaRuleSizes) -> DeltaRuleOperands:
    """Append the operands of a node."""
    given, *_, past_state, key_mask = node.inputs
    q, k, v, g, read, write = (b.Cast(x, to=TensorProto.FLOAT) for x in node.inputs[:6])
    q = b.Mul(q, b.const(float(node.attributes.get("scale", 1.0))))
    if key_mask:
        keep, zero = b.Unsqueeze(key_mask, b.const([2])), b.const(0.0)
        k, g, read = (b.Where(keep, x, zero) for x in (k, g, read))
    batch, length = b.Shape(given, start=0, end=1), b.Shape(given, start=1, end=2)
    shape = b.Concat(batch, b.const([sizes.heads, sizes.d_k, sizes.d_v]), axis=0)
    S = b.Cast(past_state or b.Expand(b.const(0.0), shape), to=TensorProto.FLOAT)
    return DeltaRuleOperands(q, k, v, g, read, write, S, batch, length)
