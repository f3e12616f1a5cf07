"""The portable lowering of causal LinearAttention: chunks of tokens, standard operators, any T.

The sequence is cut into N = ceil(T / chunk_size) chunks of C = ceil(T / N) tokens (so T = 1 is one
chunk of one token, and at most N - 1 tokens of padding are added), and a Scan carries the state S
from chunk to chunk. Within a chunk, with L_t the sum of decays up to t and
D_ts = exp(L_t - L_s) for s <= t, 0 otherwise:

    U   = V                                                      linear, gated
    U   = (I + A)^-1 (beta * (V - (K * exp(L)) S)),  A_ts = beta_t (k_t . k_s) D_ts for s < t
    O   = (Q * exp(L)) S + ((Q K^T) * D) U
    S'  = exp(L_C) * S + (K * exp(L_C - L))^T U

The normaliser is a column of the state: U has a last column of ones, O one of denominators, and S
one that is z. It is zero, as the values are, where a token is masked or padded.

The differences L_t - L_s are summed directly (a masked cumulative sum), never subtracted, so a
decay of any size, -inf too, loses no precision. Memory and time are linear in T.

Where the node applies a feature map itself, Q and K above are phi_q(Q) and phi_k(K), computed in
the chunk; and where phi represents a scalar kernel, Q K^T is kappa of the products of the widths
before the map.
Source: the chunk form of MATH 1; Yang et al. 2024 (arXiv 2406.06484) for the delta rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from linexport.plugins.ops.body import Body
from linexport.plugins.ops.linear_attention.absorbed import AbsorbedMap
from linexport.plugins.ops.linear_attention.spec import LinearAttentionSpec, Sizes

PER_CHANNEL_CHUNK = 16
"""Tokens a chunk where decay differs per key channel: D is then (C, C, d_k) and must stay small."""


def write(
    spec: LinearAttentionSpec,
    sizes: Sizes,
    inputs: Sequence[str],
    phi: AbsorbedMap | None = None,
    balanced: bool = True,
) -> tuple[Body, list[str]]:
    """A body computing output, present_state and present_normalizer from the op's eight inputs.

    Args:
        spec: its attributes.
        sizes: its head counts and widths.
        inputs: the eight formal names in order, "" for an absent one.
        phi: the map that the node applies to query and key.
        balanced: chunks of C tokens as above. Otherwise all are of chunk_size: more padding, for
            runtimes that plan their memory by what shapes can be at most, which take C for T.
    """
    b = Body()
    query, key, value, past_state, past_normalizer, decay, beta, key_mask = inputs
    batch = b.Shape(query, start=0, end=1)
    length = b.Shape(query, start=1, end=2)
    query_f, key_f, value_f = (b.Cast(x, to=TensorProto.FLOAT) for x in (query, key, value))
    decay_f, beta_f = (x and b.Cast(x, to=TensorProto.FLOAT) for x in (decay, beta))
    if phi is None:
        query_f = b.Mul(query_f, b.const(float(spec.scale)))
    heads = spec.kv_num_heads
    value_f = b.Reshape(value_f, b.const([0, 0, heads, sizes.d_v]))
    ones = b.Expand(b.const(1.0), _dims(b, batch, length, heads, 1))
    value_f = b.Concat(value_f, ones, axis=3)
    value_f = b.Reshape(value_f, b.const([0, 0, heads * (sizes.d_v + 1)]))
    if key_mask:
        keep = b.Unsqueeze(key_mask, b.const([2]))
        key_f, value_f, decay_f, beta_f = (
            x and b.Where(keep, x, b.const(0.0)) for x in (key_f, value_f, decay_f, beta_f)
        )

    S = past_state or b.Expand(b.const(0.0), _dims(b, batch, heads, sizes.d_k, sizes.d_v))
    z = past_normalizer or b.Expand(b.const(0.0), _dims(b, batch, heads, sizes.d_k))
    states = [b.Cast(S, to=TensorProto.FLOAT), b.Unsqueeze(z, b.const([3]))]
    past = b.Unsqueeze(b.Concat(*states, axis=3), b.const([2]))

    cut = _Cutter(b, spec, sizes, batch, length, balanced)
    chunks = [
        cut.split(query_f, spec.q_num_heads, queries=True),
        cut.split(key_f, sizes.key_heads),
        cut.split(value_f, heads),
    ]
    if spec.has_decay:
        chunks.append(cut.split(decay_f, heads))
    if spec.has_beta:
        chunks.append(cut.split(beta_f, heads if sizes.beta_per_head else 1))

    cell = _cell(b, spec, sizes, phi, len(chunks))
    last, output = b.Scan(past, *chunks, outputs=2, body=cell, num_scan_inputs=len(chunks))
    output = b.CastLike(cut.join(output), query)
    S, z = _columns(b, b.Squeeze(last, b.const([2])), sizes)
    return b, [output, S, b.Squeeze(z, b.const([3]))]


def _dims(b: Body, *sizes: int | str) -> str:
    """A shape tensor of fixed sizes and one-element tensors."""
    parts = [b.const([s]) if isinstance(s, int) else s for s in sizes]
    return str(b.Concat(*parts, axis=0))


class _Cutter:
    """Cuts (B, T, heads*d) into chunks (N, B, H_kv, G, C, d) and joins them again.

    G counts the query heads that share one key/value head; it is 1 for keys and values.
    """

    def __init__(
        self,
        b: Body,
        spec: LinearAttentionSpec,
        sizes: Sizes,
        batch: str,
        length: str,
        balanced: bool,
    ) -> None:
        self.b, self.spec, self.batch, self.length = b, spec, batch, length
        self.width = spec.output_heads * sizes.d_v
        one = b.const([1])
        largest = PER_CHANNEL_CHUNK if sizes.decay_per_channel else spec.chunk_size
        self.size = b.const([min(largest, spec.chunk_size)])
        self.count = b.Max(_ceil_div(b, length, self.size), one)
        if balanced:
            # At least 1: for T = 0, ONNX Runtime leaves products over no tokens uninitialised.
            self.size = b.Max(_ceil_div(b, length, self.count), one)
        padding = b.Sub(b.Mul(self.count, self.size), length)
        self.pads = b.Concat(b.const([0, 0, 0, 0]), padding, b.const([0]), axis=0)

    def split(self, packed: str, heads: int, queries: bool = False) -> str:
        b, served = self.b, self.spec.output_heads if queries else self.spec.kv_num_heads
        packed = b.Pad(packed, self.pads)
        width = b.Div(b.Shape(packed, start=2, end=3), b.const([heads]))
        shape = _dims(b, self.batch, self.count, self.size, heads, width)
        x = b.Reshape(packed, shape, allowzero=1)
        if heads != served:
            x = b.Gather(x, b.const(np.repeat(np.arange(heads), served // heads)), axis=3)
        kv = self.spec.kv_num_heads
        grouped = _dims(b, self.batch, self.count, self.size, kv, served // kv, width)
        return str(b.Transpose(b.Reshape(x, grouped, allowzero=1), perm=[1, 0, 3, 4, 2, 5]))

    def join(self, chunks: str) -> str:
        b = self.b
        x = b.Transpose(chunks, perm=[1, 0, 4, 2, 3, 5])
        padded = b.Mul(self.count, self.size)
        x = b.Reshape(x, _dims(b, self.batch, padded, self.width), allowzero=1)
        return str(b.Slice(x, b.const([0]), self.length, b.const([1])))


def _ceil_div(b: Body, numerator: str, denominator: str) -> str:
    return str(b.Div(b.Sub(b.Add(numerator, denominator), b.const([1])), denominator))


def _transpose(b: Body, x: str) -> str:
    return str(b.Transpose(x, perm=[0, 1, 2, 4, 3]))


def _row_sums(b: Body, x: str) -> str:
    return str(b.ReduceSum(x, b.const([-1]), keepdims=1))


def _columns(b: Body, extended: str, sizes: Sizes) -> tuple[str, str]:
    """The columns of the values and the one behind them that sums weights."""
    last, width = b.const([-1]), b.const([sizes.d_v])
    value = b.Slice(extended, b.const([0]), width, last)
    return value, b.Slice(extended, width, b.const([sizes.d_v + 1]), last)


def _cell(
    outer: Body, spec: LinearAttentionSpec, sizes: Sizes, phi: AbsorbedMap | None, scanned: int
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
        q, k = _mapped(b, spec, phi, q, k)
    k_t = _transpose(b, k)
    q_decayed, k_decayed, k_rest, S_end = q, k, k_t, S
    if decay:
        from_start = b.Exp(b.CumSum(decay, b.const(3)))
        to_end = b.Exp(b.CumSum(decay, b.const(3), exclusive=1, reverse=1))
        pairs = _decay_pairs(b, decay, sizes.decay_per_channel)
        q_decayed, k_decayed = b.Mul(q, from_start), b.Mul(k, from_start)
        k_rest = _transpose(b, b.Mul(k, to_end))
        S_end = b.Mul(S, b.Exp(_row_sums(b, _transpose(b, decay))))
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
        value, ones = _columns(b, v, sizes)
        stored, _ = _columns(b, S, sizes)
        target = b.Mul(beta, b.Sub(value, b.MatMul(k_decayed, stored)))
        below = b.Trilu(b.Mul(beta, keys), b.const(-1), upper=0)
        update = b.MatMul(_unit_lower_inverse(b, below, spec.chunk_size), target)
        v = b.Concat(update, ones, axis=-1)
    sums = b.Add(b.MatMul(q_decayed, S), b.MatMul(scores, v))
    output, denominator = _columns(b, sums, sizes)
    if spec.normalize:
        output = b.Div(output, b.Add(denominator, b.const(float(spec.eps))))
    S_next = b.Add(S_end, b.MatMul(k_rest, v))
    return b.subgraph("chunk", [S, *chunk], [S_next, output])


def _mapped(
    b: Body, spec: LinearAttentionSpec, phi: AbsorbedMap, q: str, k: str
) -> tuple[str, str]:
    """scale phi_q(q) and phi_k(k)."""
    q, k = phi.apply(b, "query", q), phi.apply(b, "key", k)
    return (q if spec.scale == 1.0 else b.Mul(q, b.const(float(spec.scale)))), k


def _by_kappa(b: Body, spec: LinearAttentionSpec, phi: AbsorbedMap, q: str, k: str) -> str:
    """The products of ``_mapped`` without features; "" for a map that has no scalar kernel."""
    products = phi.kappa(b, b.MatMul(q, _transpose(b, k))) or ""
    if products and spec.scale != 1.0:
        products = b.Mul(products, b.const(float(spec.scale)))
    return products


def _contract(b: Body, decayed_keys: str, x: str) -> str:
    """Sum over channels of x_t * decayed_keys_ts: (B, H, G, C, d) to (B, H, G, C, C)."""
    return str(b.Squeeze(b.MatMul(decayed_keys, b.Unsqueeze(x, b.const([5]))), b.const([5])))


def _decay_pairs(b: Body, decay: str, per_channel: bool) -> str:
    """D_ts = exp(sum of decays in (s, t]) for s <= t, else 0.

    D is (B, H, 1, C, C), or (B, H, 1, C, C, d_k) per channel.
    """
    size = b.Shape(decay, start=3, end=4)
    index = b.Range(b.const(0), b.Squeeze(size, b.const([0])), b.const(1))
    row, column = b.Unsqueeze(index, b.const([1])), b.Unsqueeze(index, b.const([0]))
    after, upto = b.Greater(row, column), b.GreaterOrEqual(row, column)
    steps = decay  # (..., C, 1): broadcasts over s
    if per_channel:
        after, upto = (b.Unsqueeze(x, b.const([2])) for x in (after, upto))
        steps = b.Unsqueeze(decay, b.const([4]))
    sums = b.CumSum(b.Where(after, steps, b.const(0.0)), b.const(3))
    return str(b.Exp(b.Where(upto, sums, b.const(-np.inf))))


def _unit_lower_inverse(b: Body, below: str, largest: int) -> str:
    """(I + A)^-1 for strictly lower triangular A, by doubling the size of inverted blocks.

    With X the inverse of the diagonal blocks of size w and A_w the part of A that joins two of
    them, X - X A_w X inverts the blocks of size 2w. Close to forward substitution in accuracy,
    unlike a series in powers of A, whose entries grow like binomials.
    """
    size = b.Shape(below, start=3, end=4)
    index = b.Range(b.const(0), b.Squeeze(size, b.const([0])), b.const(1))
    row, column = b.Unsqueeze(index, b.const([1])), b.Unsqueeze(index, b.const([0]))
    inverse = b.Cast(b.Equal(row, column), to=TensorProto.FLOAT)
    width = 1
    while width < largest:
        pair, w = b.const(2 * width), b.const(width)
        same = b.Equal(b.Div(row, pair), b.Div(column, pair))
        joins = b.And(same, b.Not(b.Equal(b.Div(row, w), b.Div(column, w))))
        joined = b.Where(joins, below, b.const(0.0))
        inverse = b.Sub(inverse, b.MatMul(b.MatMul(inverse, joined), inverse))
        width *= 2
    return str(inverse)
