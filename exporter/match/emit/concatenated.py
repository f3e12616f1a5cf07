"""Queries and keys of scores that are a sum of products: their features side by side.

[c_1 q_1, c_2 q_2, ..]    [k_1, k_2, ..]        for every head
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.monomials import Size
from linexport.match.emit.layout import written_size
from linexport.match.emit.operands import Factors
from linexport.match.forms.axes import Axis, Index, size_of
from linexport.match.forms.terms import Leaf
from linexport.match.roles.roles import Roles


def with_concatenated_features(writer: Factors, dtype: np.dtype[np.generic]) -> Roles:
    """Write the queries and keys of all products, and return the roles of one product of them."""
    roles, layout = writer.roles, writer.layout
    channel = Axis(Size(roles.features))
    query, key = (
        _side_by_side(writer, sides, time, heads, channel, dtype)
        for sides, time, heads in (
            (
                [(p.query, p.channels, p.factor) for p in roles.products],
                roles.query_position,
                layout.query,
            ),
            ([(p.key, p.channels, 1.0) for p in roles.products], roles.key_position, layout.key),
        )
    )
    return replace(roles, query=(query,), key=(key,), channels=(channel,), products=())


def _side_by_side(
    writer: Factors,
    sides: Sequence[tuple[tuple[Leaf, ...], Index, float]],
    time: Index,
    heads: Index,
    channel: Axis,
    dtype: np.dtype[np.generic],
) -> Leaf:
    parts = list[gs.Tensor]()
    batch = writer.roles.batch
    for leaves, channels, factor in sides:
        packed = (batch, time, (*heads, *channels))
        part = writer.packed_in(packed, leaves, heads, dtype)
        if factor != 1.0:
            # c (q . k) = (c q) . k
            part = writer.op.Mul(part, factor)
        parts.append(writer.reshape(part, packed, (batch, time, heads, channels)))
    split = (batch, time, heads, (channel,))
    shape = [written_size(size_of(group)) for group in split]
    joined = writer.add("Concat", parts, dtype, attrs={"axis": 3}, shape=shape)
    packed = (batch, time, (*heads, channel))
    return Leaf(writer.reshape(joined, split, packed), packed)
