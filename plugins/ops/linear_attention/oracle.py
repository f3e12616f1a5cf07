"""Linear attention, token by token, in float64: the definition every other form is tested against.

For each token, with alpha_t = exp(decay_t), or exp(decay_t decay_scale), scale s and the key of a
masked token set to zero (and its decay to zero, so that it leaves the state as it was):

    linear       S_t = S_{t-1} + k_t v_t^T
    gated        S_t = alpha_t S_{t-1} + k_t v_t^T
    delta        S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T
    gated_delta  S_t = alpha_t S_{t-1} + beta_t k_t (v_t - (alpha_t S_{t-1})^T k_t)^T
    normalizer   z_t = alpha_t z_{t-1} + k_t
    output       o_t = s q_t^T S_t                            normalize = 0
                 o_t = s q_t^T S_t / (s q_t^T z_t + eps)      normalize = 1

``causal = 0`` uses the last S and z for every t; there may be more or fewer keys than queries.
Source: the reference recurrence of ONNX's LinearAttention (opset 27), with a normaliser, a mask and
a bidirectional form added.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from linexport.plugins.ops.linear_attention.spec import LinearAttentionSpec

Array = NDArray[np.float64]


def linear_attention(
    spec: LinearAttentionSpec,
    query: Array,
    key: Array,
    value: Array,
    past_state: Array | None = None,
    past_normalizer: Array | None = None,
    decay: Array | None = None,
    beta: Array | None = None,
    key_mask: NDArray[np.bool_] | None = None,
    decay_scale: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Output (B, T, H*d_v), state (B, H_kv, d_k, d_v) and normalizer (B, H_kv, d_k), all float64.

    Shapes are those of ``spec``. The normalizer is returned whether or not ``spec.normalize``.

    Raises:
        OpError: shapes that do not fit.
    """
    inputs = (query, key, value, past_state, past_normalizer, decay, beta, key_mask, decay_scale)
    sizes = spec.check(*(None if x is None else x.shape for x in inputs))  # type: ignore[arg-type]
    batch, length = key.shape[:2]
    queries = query.shape[1]
    heads, d_k, d_v = spec.kv_num_heads, sizes.d_k, sizes.d_v

    q = _heads(query, spec.q_num_heads, spec.output_heads)
    k = _heads(key, sizes.key_heads, heads)
    v = _heads(value, heads, heads)
    alpha = np.ones((batch, length, heads, 1))
    if decay is not None:
        scale = 1.0 if decay_scale is None else np.asarray(decay_scale, np.float64)
        alpha = np.exp(_heads(decay, heads, heads) * scale)
    step = np.ones((batch, length, heads))
    if beta is not None:
        step = np.broadcast_to(np.asarray(beta, np.float64), (batch, length, heads)).copy()
    if key_mask is not None:
        k = np.where(key_mask[:, :, None, None], k, 0.0)
        alpha = np.where(key_mask[:, :, None, None], alpha, 1.0)

    S: Array = np.zeros((batch, heads, d_k, d_v))
    z: Array = np.zeros((batch, heads, d_k))
    if past_state is not None:
        S = S + past_state
    if past_normalizer is not None:
        z = z + past_normalizer
    output = np.zeros((batch, queries, spec.output_heads, d_v))
    for t in range(length):
        S = alpha[:, t, :, :, None] * S
        z = alpha[:, t] * z + k[:, t]
        target = v[:, t]
        if spec.has_beta:
            target = step[:, t, :, None] * (target - np.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + k[:, t, :, :, None] * target[:, :, None, :]
        if spec.causal:
            output[:, t] = _read(spec, q[:, t], S, z)
    if not spec.causal:
        for t in range(queries):
            output[:, t] = _read(spec, q[:, t], S, z)
    return output.reshape(batch, queries, spec.output_heads * d_v), S, z


def _read(spec: LinearAttentionSpec, query: Array, S: Array, z: Array) -> Array:
    """o_t (B, H, d_v) of the queries (B, H, d_k) of one token."""
    group = spec.output_heads // spec.kv_num_heads
    S, z = np.repeat(S, group, axis=1), np.repeat(z, group, axis=1)
    o = spec.scale * np.einsum("bhk,bhkv->bhv", query, S)
    if spec.normalize:
        denominator = spec.scale * np.einsum("bhk,bhk->bh", query, z) + spec.eps
        with np.errstate(divide="ignore", invalid="ignore"):
            o = o / denominator[:, :, None]
    return np.asarray(o)


def _heads(packed: Array, heads: int, served: int) -> Array:
    """(B, T, heads*d) as (B, T, served, d), each head repeated for the heads it serves."""
    split = np.asarray(packed, np.float64).reshape(
        *packed.shape[:2], heads, packed.shape[2] // heads
    )
    return np.repeat(split, served // heads, axis=2)
