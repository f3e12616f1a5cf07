"""Gated LinearAttention with keys and values of width one (RG-LRU, minGRU, RWKV-4).

    h_t = exp(g_t) h_{t-1} + k_t v_t,   y_t = q_t h_t     z with v = 1: y_t / (q_t z_t + eps)

The state of a head is a number. The chunk form has pairs of tokens for each, and kernels of
matrices pad it to a matrix; here all heads are the channels of one ``recurrence``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from linexport.plugins.ops.body import Body
from linexport.plugins.ops.linear_attention.absorbed import AbsorbedMap
from linexport.plugins.ops.linear_attention.spec import AttentionSizes, LinearAttentionSpec
from linexport.plugins.ops.recurrence import SUMS, Recurrence


def fits(spec: LinearAttentionSpec, sizes: AttentionSizes) -> bool:
    """The op is of that kind; queries and keys have one head for all values, or each its own."""
    shared = {spec.q_num_heads, sizes.key_heads} <= {1, spec.kv_num_heads}
    numbers = sizes.d_k == sizes.d_v == 1
    return numbers and shared and spec.causal and spec.update_rule == "gated"


def write(
    b: Body,
    spec: LinearAttentionSpec,
    sizes: AttentionSizes,
    inputs: Sequence[str],
    phi: AbsorbedMap | None,
) -> list[str]:
    """Append output, present_state and present_normalizer computed from the op's eight inputs."""
    query, key, value, *pasts, decay, _, key_mask = inputs
    heads, addends = spec.kv_num_heads, 2 if spec.normalize else 1
    q, k, v, g = (b.Cast(x, to=TensorProto.FLOAT) for x in (query, key, value, decay))
    if phi is not None:
        q = phi.apply_packed(b, "query", q, spec.q_num_heads)
        k = phi.apply_packed(b, "key", k, sizes.key_heads)
    if key_mask:
        keep = b.Unsqueeze(key_mask, b.const([2]))
        k, g = b.Where(keep, k, b.const(0.0)), b.Where(keep, g, b.const(0.0))
    added = [b.Mul(k, v), b.Expand(k, b.Shape(v)) if spec.normalize else ""][:addends]
    shape = b.Concat(b.Shape(query, start=0, end=1), b.const([heads]), axis=0)
    starts = [b.Reshape(x, shape) if x else b.Expand(b.const(0.0), shape) for x in pasts[:addends]]
    found = Recurrence(SUMS, b.Exp(g), heads).write(b, added, starts)
    if spec.scale != 1.0:
        q = b.Mul(q, b.const(float(spec.scale)))
    sums = [b.Mul(q, h) for h in found[:addends]]
    state = b.Reshape(found[addends], b.const([0, heads, 1, 1]))
    if not spec.normalize:
        zeros = b.const(np.zeros((1, heads, 1), np.float32))
        return [b.CastLike(sums[0], query), state, zeros]
    output = b.Div(sums[0], b.Add(sums[1], b.const(float(spec.eps))))
    return [b.CastLike(output, query), state, b.Reshape(found[-1], b.const([0, heads, 1]))]
