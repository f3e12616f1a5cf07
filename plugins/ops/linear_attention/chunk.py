"""The portable lowering of causal LinearAttention: chunks of tokens, standard operators, any T.

The sequence is cut into N = ceil(T / chunk_size) chunks of C = ceil(T / N) tokens (so T = 1 is one
chunk of one token), and a Scan carries the state S from chunk to chunk. Within a chunk, with L_t
the sum of decays up to t and D_ts = exp(L_t - L_s) for s <= t, 0 otherwise:

    U   = V                                                      linear, gated
    U   = (I + A)^-1 (beta * (V - (K * exp(L)) S)),  A_ts = beta_t (k_t . k_s) D_ts for s < t
    O   = (Q * exp(L)) S + ((Q K^T) * D) U
    S'  = exp(L_C) * S + (K * exp(L_C - L))^T U

The normaliser is a column of the state (``cut``): U has a last column of ones, and O one of
denominators.

The differences L_t - L_s are summed directly (a masked cumulative sum), never subtracted, so a
decay of any size, -inf too, loses no precision. Memory and time are linear in T.

Where the node applies a feature map itself, Q and K above are phi_q(Q) and phi_k(K), computed in
the chunk; and where phi represents a scalar kernel, Q K^T is kappa of the products of the widths
before the map.
Source: docs/math.md, "Chunk form"; Yang et al. 2024 (arXiv 2406.06484) for the delta rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from linexport.plugins.ops.body import Body
from linexport.plugins.ops.linear_attention.absorbed import AbsorbedMap
from linexport.plugins.ops.linear_attention.cut import Cutter, operands, transposed, value_columns
from linexport.plugins.ops.linear_attention.spec import AttentionSizes, LinearAttentionSpec
from linexport.plugins.ops.triangular import unit_lower_inverse

PER_CHANNEL_CHUNK = 16
"""Tokens a chunk where decay differs per key channel: D is then (C, C, d_k) and must stay small."""


def write(
    b: Body,
    spec: LinearAttentionSpec,
    sizes: AttentionSizes,
    inputs: Sequence[str],
    phi: AbsorbedMap | None = None,
    balanced: bool = True,
) -> list[str]:
    """Append output, present_state and present_normalizer computed from the op's eight inputs.

    Args:
        b: the body to append to.
        spec: its attributes.
        sizes: its head counts and widths.
        inputs: the eight formal names in order, "" for an absent one.
        phi: the map that the node applies to query and key.
        balanced: chunks of C tokens as above. Otherwise all are of chunk_size: more padding, for
            runtimes that plan their memory by what shapes can be at most, which take C for T.
    """
    given, heads = operands(b, spec, sizes, inputs), spec.kv_num_heads
    largest = (
        min(PER_CHANNEL_CHUNK, spec.chunk_size) if sizes.decay_per_channel else spec.chunk_size
    )
    cut = Cutter(b, spec, sizes, inputs[0], largest, balanced)
    chunks = [
        cut.split(given.query, spec.q_num_heads, queries=True),
        cut.split(given.key, sizes.key_heads),
        cut.split(given.value, heads),
    ]
    if spec.has_decay:
        chunks.append(cut.split(given.decay, heads))
    if spec.has_beta:
        chunks.append(cut.split(given.beta, heads if sizes.beta_per_head else 1))

    cell = _cell(b, spec, sizes, phi, len(chunks))
    shared = b.Unsqueeze(given.past, b.const([2]))
    last, output = b.Scan(shared, *chunks, outputs=2, body=cell, num_scan_inputs=len(chunks))
    S, z = value_columns(b, b.Squeeze(last, b.const([2])), sizes)
    return [cut.join(output), S, b.Squeeze(z, b.const([3]))]


def _row_sums(b: Body, x: str) -> str:
    return str(b.ReduceSum(x, b.const([-1]), keepdims=1))


def _cell(
    outer: Body,
    spec: LinearAttentionSpec,
    sizes: AttentionSizes,
    phi: AbsorbedMap | None,
    scanned: int,
) -> object:
    """The Scan body: one chunk, tensors (B, H_kv, G, C, d) and state (B, H_kv, 1, d_k, d_v + 1)."""
    b = Body(outer)
    S = b.fresh("S")
    chunk = [b.fresh("chunk") for _ in range(scanned)]
    q, k, v, *gates = chunk
    beta = gates.pop() if spec.has_beta else ""
    decay = gates.pop() if spec.has_decay else ""

    products = ""
    if phi is not None:
        if not sizes.decay_per_channel:
            products = _by_kappa(b, spec, phi, q, k)
        q, k = phi.apply(b, "query", q), phi.apply(b, "key", k)
    if spec.scale != 1.0:
        q = b.Mul(q, b.const(float(spec.scale)))
    k_t = transposed(b, k)
    q_decayed, k_decayed, k_rest, S_end = q, k, k_t, S
    if decay:
        from_start = b.Exp(b.CumSum(decay, b.const(3)))
        to_end = b.Exp(b.CumSum(decay, b.const(3), exclusive=1, reverse=1))
        pairs = _decay_pairs(b, decay, sizes.decay_per_channel)
        q_decayed, k_decayed = b.Mul(q, from_start), b.Mul(k, from_start)
        k_rest = transposed(b, b.Mul(k, to_end))
        S_end = b.Mul(S, b.Exp(_row_sums(b, transposed(b, decay))))
        if sizes.decay_per_channel:
            decayed = b.Mul(b.Unsqueeze(k, b.const([3])), pairs)
            scores = _contract(b, decayed, q)
            keys = _contract(b, decayed, k) if beta else ""
        else:
            scores = b.Mul(products or b.MatMul(q, k_t), pairs)
            keys = b.Mul(b.MatMul(k, k_t), pairs) if beta else ""
    else:
        scores = b.Trilu(products or b.MatMul(q, k_t), upper=0)
        keys = b.MatMul(k, k_t) if beta else ""

    if beta:
        value, ones = value_columns(b, v, sizes)
        stored, _ = value_columns(b, S, sizes)
        target = b.Mul(beta, b.Sub(value, b.MatMul(k_decayed, stored)))
        below = b.Trilu(b.Mul(beta, keys), b.const(-1), upper=0)
        inverse = unit_lower_inverse(b, below, _index(b, below), spec.chunk_size)
        update = b.MatMul(inverse, target)
        v = b.Concat(update, ones, axis=-1)
    sums = b.Add(b.MatMul(q_decayed, S), b.MatMul(scores, v))
    output, denominator = value_columns(b, sums, sizes)
    if spec.normalize:
        output = b.Div(output, b.Add(denominator, b.const(float(spec.eps))))
    S_next = b.Add(S_end, b.MatMul(k_rest, v))
    return b.subgraph("chunk", [S, *chunk], [S_next, output])


def _by_kappa(b: Body, spec: LinearAttentionSpec, phi: AbsorbedMap, q: str, k: str) -> str:
    """scale phi_q(q) . phi_k(k) without features; "" for a map that has no scalar kernel."""
    products = phi.kappa(b, b.MatMul(q, transposed(b, k))) or ""
    if products and spec.scale != 1.0:
        products = b.Mul(products, b.const(float(spec.scale)))
    return products


def _contract(b: Body, decayed_keys: str, x: str) -> str:
    """Sum over channels of x_t * decayed_keys_ts: (B, H, G, C, d) to (B, H, G, C, C)."""
    return str(b.Squeeze(b.MatMul(decayed_keys, b.Unsqueeze(x, b.const([5]))), b.const([5])))


def _index(b: Body, chunk: str) -> str:
    """0, 1, ... of a chunk's tokens, from a tensor (B, H, G, C, ...)."""
    size = b.Squeeze(b.Shape(chunk, start=3, end=4), b.const([0]))
    return str(b.Range(b.const(0), size, b.const(1)))


def _decay_pairs(b: Body, decay: str, per_channel: bool) -> str:
    """D_ts = exp(sum of decays in (s, t]) for s <= t, else 0.

    D is (B, H, 1, C, C), or (B, H, 1, C, C, d_k) per channel.
    """
    index = _index(b, decay)
    row, column = b.Unsqueeze(index, b.const([1])), b.Unsqueeze(index, b.const([0]))
    after, upto = b.Greater(row, column), b.GreaterOrEqual(row, column)
    steps = decay  # (..., C, 1): broadcasts over s
    if per_channel:
        after, upto = (b.Unsqueeze(x, b.const([2])) for x in (after, upto))
        steps = b.Unsqueeze(decay, b.const([4]))
    sums = b.CumSum(b.Where(after, steps, b.const(0.0)), b.const(3))
    return str(b.Exp(b.Where(upto, sums, b.const(-np.inf))))
