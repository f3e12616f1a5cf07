"""Softmax attention of torch -> a product, a mask, a softmax and a product.

    O = softmax(scale Q K^T + M) V      Q (.., H, T, d), K (.., G, S, d), V (.., G, S, d_v), H = r G

There may be no H and G, and any number of axes in front of them. A query that sees no key, as one
whose row of M is minus infinity, has O = 0.

torch's own translation is of four axes. It multiplies keys by the root of the scale, so that keys
which are kept as a state are other ones; it copies them in a layout of its own, and a query that
sees no key gets the mean of the values, or NaN.
"""

from __future__ import annotations

from typing import Any

from onnxscript import ir, values
from onnxscript.function_libs.torch_lib.ops import nn as torch_lib

OPSET = 20
HIDDEN = float("-inf")


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> object:
    """Write ``aten.scaled_dot_product_attention`` as nodes of a graph."""
    width = query.shape[-1]
    if dropout_p or (scale is None and not isinstance(width, int)):
        return torch_lib.aten_scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        )
    op, (*front, row, channel) = values.Opset("", OPSET), range(len(key.shape))
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        key, value = (_repeated(op, x, query.shape[-3]) for x in (key, value))
    products = op.MatMul(query, op.Transpose(key, perm=[*front, channel, row]))
    scores = op.Mul(products, op.CastLike(width**-0.5 if scale is None else scale, query))
    seen = _earlier(op, query, key) if is_causal else attn_mask
    if seen is None:
        return op.MatMul(op.Softmax(scores, axis=-1), value)
    zero = op.CastLike(0.0, query)
    if is_causal or attn_mask.dtype == ir.DataType.BOOL:
        seen = op.Where(seen, zero, op.CastLike(HIDDEN, query))
    weights = op.Softmax(op.Add(scores, seen), axis=-1)
    if not is_causal:
        weights = op.Where(op.IsNaN(weights), zero, weights)
    return op.MatMul(weights, value)


def _repeated(op: Any, x: Any, heads: int) -> Any:
    """Return keys or values for each head of queries, (.., H, S, d)."""
    *front, groups, length, width = x.shape
    each = op.Unsqueeze(x, [len(front) + 1])
    each = op.Expand(each, [1] * (len(front) + 1) + [heads // groups, 1, 1])
    each.shape = ir.Shape([*front, groups, heads // groups, length, width])
    found = op.Reshape(each, [0] * len(front) + [heads, -1, width])
    # What ONNX infers of -1 is no symbol, and scores would not be those of all pairs of tokens.
    found.shape = ir.Shape([*front, heads, length, width])
    found.type = each.type = x.type
    return found


def _earlier(op: Any, query: Any, key: Any) -> Any:
    """Return whether key s is not behind query t, (T, S)."""
    rows, columns = (
        op.Range(0, op.Squeeze(op.Shape(x, start=-2, end=-1)), 1) for x in (query, key)
    )
    return op.LessOrEqual(columns, op.Unsqueeze(rows, [1]))
