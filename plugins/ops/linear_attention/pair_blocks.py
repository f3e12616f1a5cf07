"""Causal LinearAttention with a map made of pairs of components, tokens innermost.

    phi(x) = [first(x), s x_i^2, s sqrt2 x_i x_j (i < j)]        phi(q) . phi(k) = kappa(q . k)

In chunks of C tokens, as in ``chunk``, with every tensor transposed:

    O  = V kappa(K^T Q, masked) + sum_b S_b phi_b(Q)
    S_b' = S_b + V phi_b(K)^T

b runs over ``first`` and over blocks of rows of x x^T: rows i of a block times all columns from its
first on. Such a block is one broadcast product of (rows, 1, C) and (1, columns, C), in which
memory is written once and in order, and which is multiplied with its own part of the state; all
features in a row, as the op's state wants them, would be 2 d pieces to be copied into place. Within
the square at the head of a block both x_i x_j and x_j x_i occur, each with 1 / sqrt2 of the
feature. Measured by ``tools/bench_maps.py taylor2``.

Up to ``SHORTEST`` tokens it does not pay to reorder the state, and ``chunk`` is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from linexport.plugins.ops.body import Body
from linexport.plugins.ops.linear_attention import chunk
from linexport.plugins.ops.linear_attention.absorbed import AbsorbedMap
from linexport.plugins.ops.linear_attention.cut import Cutter, operands, transposed, value_columns
from linexport.plugins.ops.linear_attention.spec import AttentionSizes, LinearAttentionSpec

TOKENS = 128
"""In a chunk at most: products of a block then stay in cache."""

ROWS = 16
"""Rows of x x^T in a block: fewer save half-empty squares, more are larger matrix products."""

SHORTEST = 32
"""Tokens up to which the chunk form is written."""


def fits(spec: LinearAttentionSpec, phi: AbsorbedMap) -> bool:
    """The map is made of pairs, and every token adds to the state with weight 1."""
    return phi.formulas.pairs is not None and spec.update_rule == "linear"


def write(
    b: Body,
    spec: LinearAttentionSpec,
    sizes: AttentionSizes,
    inputs: Sequence[str],
    phi: AbsorbedMap,
) -> list[str]:
    """Append output, present_state and present_normalizer computed from the op's eight inputs."""
    length = b.Shape(inputs[0], start=1, end=2)
    few, many = Body(b), Body(b)
    outputs = b.If(
        b.Squeeze(b.LessOrEqual(length, b.const([SHORTEST])), b.const([0])),
        outputs=3,
        then_branch=few.subgraph("few", [], chunk.write(few, spec, sizes, inputs, phi)),
        else_branch=many.subgraph("many", [], _scan(many, spec, sizes, inputs, phi)),
    )
    return list(outputs)


def _scan(
    b: Body,
    spec: LinearAttentionSpec,
    sizes: AttentionSizes,
    inputs: Sequence[str],
    phi: AbsorbedMap,
) -> list[str]:
    given = operands(b, spec, sizes, inputs)
    cut = Cutter(b, spec, sizes, inputs[0], TOKENS)
    chunks = [
        cut.split(given.query, spec.q_num_heads, queries=True, tokens_last=True),
        cut.split(given.key, sizes.key_heads, tokens_last=True),
        cut.split(given.value, spec.kv_num_heads, tokens_last=True),
    ]
    order = BlockOrder.of(phi)
    past = order.to_blocks(b, given.past)
    cell = _cell(b, spec, sizes, phi, order)
    *states, output = b.Scan(*past, *chunks, outputs=len(past) + 1, body=cell, num_scan_inputs=3)
    S, z = value_columns(b, order.to_features(b, states), sizes)
    return [cut.join(output, tokens_last=True), S, b.Squeeze(z, b.const([3]))]


@dataclass(frozen=True)
class BlockOrder:
    """Where the features of a state stand in blocks.

    Attributes:
        width: d.
        first: features ahead of the pairs.
        blocks: rows and columns [start, end, d) of each block.
        feature: of each place in all blocks.
        weight: of that feature there.
        place: of each feature, a last one of those it has.
    """

    width: int
    first: int
    blocks: tuple[tuple[int, int], ...]
    feature: np.ndarray
    weight: np.ndarray
    place: np.ndarray

    @classmethod
    def of(cls, phi: AbsorbedMap) -> BlockOrder:
        """Return the order for a map's width; pairs go by i, then j, as in the op's state."""
        d, first = phi.width, phi.features - phi.width * (phi.width + 1) // 2
        blocks = tuple((start, min(start + ROWS, d)) for start in range(0, d, ROWS))
        feature, weight = [np.arange(first)], [np.ones(first)]
        for start, end in blocks:
            i, j = np.meshgrid(np.arange(start, end), np.arange(start, d), indexing="ij")
            low, high = np.minimum(i, j), np.maximum(i, j)
            feature.append((first + low * d - low * (low - 1) // 2 + high - low).ravel())
            weight.append(np.where((j < end) & (i != j), math.sqrt(0.5), 1.0).ravel())
        features, weights = np.concatenate(feature), np.concatenate(weight)
        place = np.zeros(phi.features, np.int64)
        place[features] = np.arange(len(features))
        return cls(d, first, blocks, features, weights, place)

    @property
    def pairs(self) -> list[int]:
        """Places in each block."""
        return [(end - start) * (self.width - start) for start, end in self.blocks]

    @property
    def sizes(self) -> list[int]:
        """Places in ``first``, if there are any, and in each block."""
        return [self.first, *self.pairs] if self.first else self.pairs

    def to_blocks(self, b: Body, state: str) -> list[str]:
        """(B, H_kv, M, d_v + 1) as tensors (B, H_kv, 1, d_v + 1, places)."""
        x = b.Gather(state, b.const(self.feature), axis=2)
        x = b.Mul(x, b.const(self.weight[:, None]))
        x = b.Unsqueeze(b.Transpose(x, perm=[0, 1, 3, 2]), b.const([2]))
        if len(self.sizes) == 1:
            return [x]
        return list(b.Split(x, b.const(self.sizes), outputs=len(self.sizes), axis=-1))

    def to_features(self, b: Body, states: Sequence[str]) -> str:
        """The inverse of ``to_blocks``."""
        x = b.Squeeze(b.Concat(*states, axis=-1), b.const([2]))
        x = b.Gather(b.Transpose(x, perm=[0, 1, 3, 2]), b.const(self.place), axis=2)
        return str(b.Mul(x, b.const(1 / self.weight[self.place, None])))


def _cell(
    outer: Body,
    spec: LinearAttentionSpec,
    sizes: AttentionSizes,
    phi: AbsorbedMap,
    order: BlockOrder,
) -> object:
    """The Scan body: one chunk, tensors (B, H_kv, G, d, C) and states (B, H_kv, 1, d_v + 1, .)."""
    b = Body(outer)
    states = [b.fresh("S") for _ in order.sizes]
    q, k, v = chunked = [b.fresh("chunk") for _ in range(3)]

    scores = b.Trilu(phi.kappa(b, b.MatMul(transposed(b, k), q)), upper=1)
    terms, after = [b.MatMul(v, scores)], []
    for S, phi_q, phi_k in zip(
        states, _features(b, phi, order, q), _features(b, phi, order, k), strict=True
    ):
        terms.append(b.MatMul(S, phi_q))
        after.append(b.Add(S, b.MatMul(v, transposed(b, phi_k))))
    sums = b.Sum(*terms)
    if spec.scale != 1.0:
        sums = b.Mul(sums, b.const(float(spec.scale)))
    output, denominator = value_columns(b, sums, sizes, axis=-2)
    if spec.normalize:
        output = b.Div(output, b.Add(denominator, b.const(float(spec.eps))))
    return b.subgraph("chunk", [*states, *chunked], [*after, output])


def _features(b: Body, phi: AbsorbedMap, order: BlockOrder, x: str) -> list[str]:
    """phi of (B, H, G, d, C), as tensors (B, H, G, places, C)."""
    pairs = phi.formulas.pairs
    assert pairs is not None
    parts = []
    if order.first:
        first = pairs.first(b, transposed(b, x), phi.width, *phi.parameters)
        parts.append(transposed(b, first))
    root = math.sqrt(pairs.scale(phi.width))
    inside, outside = (b.Mul(x, b.const(root * math.sqrt(n))) for n in (1, 2))
    end_of_all = b.const([phi.width])
    for (start, end), size in zip(order.blocks, order.pairs, strict=True):
        axis, stop = b.const([-2]), b.const([end])
        rows = b.Slice(inside, b.const([start]), stop, axis)
        across = rows
        if end != phi.width:
            across = b.Concat(rows, b.Slice(outside, stop, end_of_all, axis), axis=-2)
        products = b.Mul(b.Unsqueeze(rows, b.const([4])), b.Unsqueeze(across, b.const([3])))
        parts.append(b.Reshape(products, b.const([0, 0, 0, size, -1])))
    return parts
