"""GeneralizedDeltaRule in standard operators: a Scan over tokens."""

from __future__ import annotations

from onnx import TensorProto

from linexport.plugins.ops.body import Body
from linexport.plugins.ops.generalized_delta_rule.definition import view
from linexport.plugins.ops.op import (
    Node,
)


def portable(node: Node) -> tuple[Body, list[str]]:
    """A Scan over tokens; at least one, as a Scan of none has no outputs to speak of.

    A token of zeros leaves the state as it was.
    """
    sizes, b = view(node), Body()
    query, *_, past_state, key_mask = node.inputs
    wide = [b.Cast(x, to=TensorProto.FLOAT) for x in node.inputs[:6]]
    wide[0] = b.Mul(wide[0], b.const(float(node.attributes.get("scale", 1.0))))
    if key_mask:
        keep, zero = b.Unsqueeze(key_mask, b.const([2])), b.const(0.0)
        for masked in (1, 3, 4):
            wide[masked] = b.Where(keep, wide[masked], zero)
    batch, length = b.Shape(query, start=0, end=1), b.Shape(query, start=1, end=2)
    padding = b.Max(b.Sub(b.const([1]), length), b.const([0]))
    pads = b.Concat(b.const([0, 0, 0, 0]), padding, b.const([0]), axis=0)
    split = b.const([0, 0, sizes.heads, -1])
    tokens = [b.Transpose(b.Reshape(b.Pad(x, pads), split), perm=[1, 0, 2, 3]) for x in wide]
    shape = b.Concat(batch, b.const([sizes.heads, sizes.d_k, sizes.d_v]), axis=0)
    S = past_state or b.Expand(b.const(0.0), shape)
    S, output = b.Scan(
        b.Cast(S, to=TensorProto.FLOAT),
        *tokens,
        outputs=2,
        body=_token(b),
        num_scan_inputs=len(tokens),
    )
    output = b.Slice(b.Transpose(output, perm=[1, 0, 2, 3]), b.const([0]), length, b.const([1]))
    packed = b.Reshape(output, b.const([0, 0, sizes.heads * sizes.d_v]))
    return b, [b.CastLike(packed, query), S]


def _token(outer: Body) -> object:
    """The Scan body: S (B, H, d_k, d_v) and one token, (B, H, d) each."""
    b = Body(outer)
    S, *token = (b.fresh(name) for name in ("S", "q", "k", "v", "g", "a", "b"))
    row, column = b.const([2]), b.const([3])
    q, v, a = (b.Unsqueeze(token[i], row) for i in (0, 2, 4))
    k, g, write = (b.Unsqueeze(token[i], column) for i in (1, 3, 5))
    found = b.MatMul(a, S)
    kept = b.Add(b.Mul(b.Exp(g), S), b.Mul(write, found))
    S_next = b.Add(kept, b.Mul(k, v))
    output = b.Squeeze(b.MatMul(q, S_next), row)
    return b.subgraph("token", [S, *token], [S_next, output])
