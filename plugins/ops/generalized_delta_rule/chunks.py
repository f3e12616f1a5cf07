"""GeneralizedDeltaRule in standard operators, by chunks of C tokens: a Scan over chunks.

For tokens r = 1 ... C of a chunk behind the state S, with A_r the product of alpha_1 ... alpha_r
by key channel, A_rs that of the decays after s and up to r, and w_r = a_r^T S_{r-1} what r reads:

    W  = (I - M_ab)^-1 ((A_{r-1} * a_r)^T S + M_ak V)    M_ay[r, s] = a_r . (A_{r-1,s} * y_s), s < r
    O  = (A_r * q_r)^T S + M_qk V + M_qb W               M_qy[r, s] = q_r . (A_rs * y_s), s <= r
    S' = A_C * S + (A_Cs * k_s)^T V + (A_Cs * b_s)^T W

Rows of W, O and V are tokens. All but the products with S is computed for all chunks at once, so
that a step of the Scan has two matrix products: [O; W] = R S + c, then S'.

A_rs is a product of decays, never a quotient of A_r and A_s, so that decays of any size, 0 too,
lose no precision. Neighbouring blocks of w tokens are joined, w = 1, 2, 4 ... C / 2: for s in the
left block and r in the right one, A_rs is the product of the left block's decays after s, which is
in its columns k_s and b_s, and of the right block's up to r, which is in its rows q_r and a_r. The
vectors of a token lie side by side, (q_1, a_1, q_2, ...) and (k_1, b_1, k_2, ...): one product
makes all four M.

Source: docs/math.md, "Generalised delta rule"; Yang et al. 2024 (arXiv 2406.06484) for the inverse.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from linexport.plugins.ops.body import Body
from linexport.plugins.ops.generalized_delta_rule.definition import DeltaRuleSizes
from linexport.plugins.ops.triangular import unit_lower_inverse

TOKENS = 16
"""C, a power of two. On the CPU 8 takes the same time and 32 a sixth more."""


def write(b: Body, state: str, vectors: Sequence[str], sizes: DeltaRuleSizes) -> tuple[str, str]:
    """Append the state behind L tokens and their outputs (B, L, H * d_v), C a divisor of L.

    Args:
        b: the body to append to.
        state: (B, H, d_k, d_v).
        vectors: query, key, value, decay, a and b, (B, L, H * d) each.
        sizes: of the node.
    """
    q, k, v, g, a, written = vectors
    d_k, d_v, heads = sizes.d_k, sizes.d_v, sizes.heads
    alpha = b.Exp(g)
    rows, columns = (
        _cut(b, b.Concat(*pair, axis=2), heads, 2, d_k)
        for pair in ((b.Mul(q, alpha), a), (k, written))
    )
    products = _own_products(b, q, (k, written), sizes)
    decays = _cut(b, alpha, heads, 1, d_k)
    rows, columns, products, decays = _joined(b, d_k, rows, columns, products, decays)

    V = b.Reshape(_cut(b, v, heads, 1, d_v), b.const([0, 0, 0, TOKENS, d_v]))
    R, c = _solved(b, _by_kind(b, rows, d_k), products, V)
    columns = b.Reshape(_by_kind(b, columns, d_k), b.const([0, 0, 0, 2 * TOKENS, d_k]))
    decays = b.Reshape(decays, b.const([0, 0, 0, d_k, 1]))
    scanned = [R, c, columns, V, decays]
    S, output = b.Scan(state, *scanned, outputs=2, body=_step(b), num_scan_inputs=len(scanned))
    tokens = b.Transpose(output, perm=[1, 0, 3, 2, 4])
    shape = b.Concat(b.Shape(v, start=0, end=2), b.const([heads * d_v]), axis=0)
    return S, b.Reshape(tokens, shape, allowzero=1)


def _cut(b: Body, packed: str, heads: int, kinds: int, width: int) -> str:
    """Chunks (N, B, H, C, kinds, width) of (B, L, kinds * H * width)."""
    batch, tail = b.Shape(packed, start=0, end=1), b.const([TOKENS, kinds, heads, width])
    count = b.Div(b.Shape(packed, start=1, end=2), b.const([TOKENS]))
    x = b.Reshape(packed, b.Concat(batch, count, tail, axis=0), allowzero=1)
    return str(b.Transpose(x, perm=[1, 0, 4, 2, 3, 5]))


def _own_products(b: Body, q: str, columns: Sequence[str], sizes: DeltaRuleSizes) -> str:
    """M of one token, (N, B, H, C, 2, 2): q . k and q . b; a reads what was before the token."""
    by_head, last = b.const([0, 0, sizes.heads, sizes.d_k]), b.const([3])
    own = [b.ReduceSum(b.Reshape(b.Mul(q, y), by_head), last, keepdims=0) for y in columns]
    chunks = _cut(b, b.Concat(*own, axis=2), sizes.heads, 2, 1)
    row = b.Reshape(chunks, b.const([0, 0, 0, TOKENS, 1, 2]))
    return str(b.Pad(row, b.const([0] * 10 + [1, 0])))


def _joined(
    b: Body, d_k: int, rows: str, columns: str, products: str, decays: str
) -> tuple[str, str, str, str]:
    """Rows, columns, M and A of chunks from those of single tokens.

    Of blocks of w tokens they are (N, B, H, C / w, 2 w, d_k) twice, (N, B, H, C / w, 2 w, 2 w) and
    (N, B, H, C / w, 1, d_k). Pairs of neighbouring blocks are an axis of their own here.
    """
    width, one = 1, b.const(1.0)
    while width < TOKENS:
        pairs = [0, 0, 0, TOKENS // (2 * width), 2]
        rows, columns = (b.Reshape(x, b.const([*pairs, 2 * width, d_k])) for x in (rows, columns))
        products = b.Reshape(products, b.const([*pairs, 2 * width, 2 * width]))
        decays = b.Reshape(decays, b.const([*pairs, 1, d_k]))
        left, right = _half(b, decays, 0), _half(b, decays, 1)
        readers, written = _half(b, rows, 1), _half(b, columns, 0)
        between = b.MatMul(readers, b.Transpose(written, perm=[0, 1, 2, 3, 4, 6, 5]))
        upper = b.Pad(_half(b, products, 0), b.const([0] * 13 + [2 * width]))
        lower = _half(b, products, 1)
        products = b.Concat(upper, b.Concat(between, lower, axis=6), axis=4)
        rows = b.Mul(rows, b.Pad(left, b.const([0] * 4 + [1] + [0] * 9), one))
        columns = b.Mul(columns, b.Pad(right, b.const([0] * 11 + [1] + [0] * 2), one))
        decays = b.Mul(left, right)
        width *= 2
    return rows, columns, products, decays


def _half(b: Body, pairs: str, which: int) -> str:
    """The left (0) or right (1) blocks of all pairs."""
    return str(b.Slice(pairs, b.const([which]), b.const([which + 1]), b.const([4])))


def _by_kind(b: Body, pairs: str, width: int) -> str:
    """A token's two vectors from side by side, (N, B, H, 1, 2 C, d), to (N, B, H, 2, C, d)."""
    x = b.Reshape(pairs, b.const([0, 0, 0, TOKENS, 2, width]))
    return str(b.Transpose(x, perm=[0, 1, 2, 4, 3, 5]))


def _solved(b: Body, rows: str, products: str, V: str) -> tuple[str, str]:
    """R (N, B, H, 2 C, d_k) and c (N, B, H, 2 C, d_v) with [O; W] = R S + c."""
    by_kind = b.Reshape(products, b.const([0, 0, 0, TOKENS, 2, TOKENS, 2]))
    by_kind = b.Transpose(by_kind, perm=[0, 1, 2, 4, 6, 3, 5])
    (M_qk, M_qb), (M_ak, M_ab) = (
        (b.Squeeze(M, b.const([3, 4])) for M in _two(b, of_one, 4))
        for of_one in _two(b, by_kind, 3)
    )
    q, a = (b.Squeeze(x, b.const([3])) for x in _two(b, rows, 3))
    inverse = unit_lower_inverse(b, b.Neg(M_ab), b.const(np.arange(TOKENS)), TOKENS)
    a, read = b.MatMul(inverse, a), b.MatMul(inverse, b.MatMul(M_ak, V))
    q, output = b.Add(q, b.MatMul(M_qb, a)), b.Add(b.MatMul(M_qk, V), b.MatMul(M_qb, read))
    return b.Concat(q, a, axis=3), b.Concat(output, read, axis=3)


def _two(b: Body, x: str, axis: int) -> tuple[str, str]:
    first, second = b.Split(x, outputs=2, axis=axis, num_outputs=2)
    return first, second


def _step(outer: Body) -> object:
    """The Scan body: S (B, H, d_k, d_v), and of a chunk R, c, its columns, V and A_C."""
    b = Body(outer)
    S, R, c, columns, V, decays = given = [
        b.fresh(name) for name in ("S", "R", "c", "columns", "V", "decays")
    ]
    output, W = _two(b, b.Add(b.MatMul(R, S), c), 2)
    added = b.MatMul(b.Transpose(columns, perm=[0, 1, 3, 2]), b.Concat(V, W, axis=2))
    return b.subgraph("chunk", given, [b.Add(b.Mul(decays, S), added), output])
