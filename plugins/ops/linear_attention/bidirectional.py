"""The portable lowering of LinearAttention with ``causal = 0``: two matrix products.

    S = K^T V      z = K^T 1      O = s Q S / (s Q z + eps)

In memory and time linear in the number of queries and of keys. The scale is put on S and z, which
are small.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from linexport.plugins.ops.body import Body
from linexport.plugins.ops.linear_attention.absorbed import AbsorbedMap
from linexport.plugins.ops.linear_attention.spec import LinearAttentionSpec, Sizes


def write(
    b: Body,
    spec: LinearAttentionSpec,
    sizes: Sizes,
    inputs: Sequence[str],
    phi: AbsorbedMap | None = None,
) -> list[str]:
    """Append output, state and normalizer computed from the op's eight inputs.

    ``inputs`` are the eight formal names in order, "" for an absent one; ``phi`` is the map that
    the node applies to query and key.
    """
    query, key, value, *_, key_mask = inputs
    query_f, key_f, value_f = (b.Cast(x, to=TensorProto.FLOAT) for x in (query, key, value))
    if phi is not None:
        query_f = phi.apply_packed(b, "query", query_f, spec.q_num_heads)
        key_f = phi.apply_packed(b, "key", key_f, sizes.key_heads)
    if key_mask:
        key_f = b.Where(b.Unsqueeze(key_mask, b.const([2])), key_f, b.const(0.0))
    heads, group = spec.kv_num_heads, spec.output_heads // spec.kv_num_heads

    # Zeros in a Reshape copy the batch and the length.
    k = b.Reshape(key_f, b.const([0, 0, sizes.key_heads, sizes.d_k]))
    k = b.Transpose(_repeat(b, k, sizes.key_heads, heads), perm=[0, 2, 3, 1])
    v = b.Reshape(value_f, b.const([0, 0, heads, sizes.d_v]))
    S = b.MatMul(k, b.Transpose(v, perm=[0, 2, 1, 3]))
    z = b.ReduceSum(k, b.const([3]), keepdims=1)

    q = b.Reshape(query_f, b.const([0, 0, spec.q_num_heads, sizes.d_k]))
    q = b.Transpose(_repeat(b, q, spec.q_num_heads, spec.output_heads), perm=[0, 2, 1, 3])
    S_q, z_q = (_repeat_states(b, _scaled(b, spec, x), heads, group) for x in (S, z))
    output = b.MatMul(q, S_q)
    if spec.normalize:
        output = b.Div(output, b.Add(b.MatMul(q, z_q), b.const(float(spec.eps))))
    output = b.Transpose(output, perm=[0, 2, 1, 3])
    output = b.Reshape(output, b.const([0, 0, spec.output_heads * sizes.d_v]))
    return [b.CastLike(output, query), S, b.Squeeze(z, b.const([3]))]


def _repeat(b: Body, split: str, heads: int, served: int) -> str:
    """(B, T, heads, d) with each head repeated for the heads it serves."""
    if heads == served:
        return split
    return str(b.Gather(split, b.const(np.repeat(np.arange(heads), served // heads)), axis=2))


def _repeat_states(b: Body, state: str, heads: int, group: int) -> str:
    """(B, heads, ...) with each head repeated for its ``group`` of query heads."""
    if group == 1:
        return state
    return str(b.Gather(state, b.const(np.repeat(np.arange(heads), group)), axis=1))


def _scaled(b: Body, spec: LinearAttentionSpec, state: str) -> str:
    return state if spec.scale == 1.0 else str(b.Mul(state, b.const(float(spec.scale))))
