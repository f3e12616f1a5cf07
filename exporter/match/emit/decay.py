"""Decays, and exponents whose running maximum is subtracted, as nodes.

    exp(i_s - m_s), g_t + m_{t-1} - m_t  and  exp(-m_t)    from    StabilizedExp(i, g)

of two features, the exponent and 0: those of a query, exp(m_t - M) and exp(-M) with
M = max(m_t, 0), have the quotient exp(-m_t).

A maximum n_t that begins with 0, as chunkwise forms and loops have it, is max(m_t, G_t) with G the
sum of all g. Queries with the exponents 0 and G have exp(m_t - n_t) and exp(G_t - n_t) as features;
with 0 as a third, those and exp(-n_t) are all divided by exp(M - n_t), with M = max(n_t, 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.tensors import static_size
from linexport.match.emit.layout import written_size
from linexport.match.emit.operands import Factors
from linexport.match.errors import NotAttentionError
from linexport.match.forms.axes import Index, size_of
from linexport.match.roles import decay
from linexport.match.roles.head_layout import axis_size
from linexport.match.roles.running_maximum import exponent_of
from linexport.plugins.ops import linear_attention, stabilized_exp
from linexport.plugins.ops.op import DOMAIN

FLOAT = np.dtype(np.float32)


class Gates(Factors):
    """Writes what fades and what is kept from overflowing."""

    _stabilized: list[gs.Variable] | None = None
    _exponents: tuple[gs.Tensor, gs.Tensor, list[gs.Tensor], gs.Tensor] | None = None

    def everywhere(self, row: np.ndarray, heads: Index, time: Index) -> gs.Tensor:
        """Numbers of the heads, (1, 1, heads), repeated for every token."""
        groups = (self.roles.batch, time, heads)
        shape = [written_size(size_of(group)) for group in groups]
        return self.op.Expand(row, self.shape_of(groups), shape=shape)

    def decay(self, dtype: np.dtype[np.generic]) -> gs.Tensor:
        """(B, T, heads) or (B, T, heads * channels)."""
        heads = self.layout.value
        found = decay.read_decay(self.roles, heads)
        if not found.leaves:
            row = np.full((1, 1, axis_size(heads)), found.coefficient, dtype)
            return self.everywhere(row, heads, self.roles.query_position)
        groups = (self.roles.batch, found.time, (*heads, *found.width))
        x = self.packed_in(groups, found.leaves, heads, dtype)
        if found.coefficient == 1.0:
            return x
        return self.op.Mul(x, found.coefficient)

    def stabilized(self, heads: Index) -> list[gs.Variable]:
        """Return query features, key features and decays of pairs, (B, T, heads * 2) each.

        Raises:
            NotAttentionError: exponents and decays are not those of these heads.
        """
        if self._stabilized is None:
            _, zero, _, sums = self._exponents_of(heads)
            self._stabilized = self._stabilized_exp([zero, sums], heads)
        return self._stabilized

    def scale(self, heads: Index) -> gs.Tensor:
        """Return exp(-m_t), or exp(-n_t), (B, T, heads).

        Raises:
            NotAttentionError: see ``stabilized``.
        """
        _, zero, _, sums = self._exponents_of(heads)
        if self.roles.from_zero:
            query, *_ = self._stabilized_exp([zero, zero, sums], heads)
        else:
            query, *_ = self.stabilized(heads)
        largest = self.feature(query, 0, heads)
        if self.roles.from_zero:
            other = self.feature(query, 2, heads)
            largest = self.op.Max(largest, other)
        return self.op.Div(self.feature(query, 1, heads), largest)

    def _exponents_of(
        self, heads: Index
    ) -> tuple[gs.Tensor, gs.Tensor, list[gs.Tensor], gs.Tensor]:
        """Return i, 0, g if there is one, and G, which is 0 where no maximum begins with 0."""
        if self._exponents is None:
            self._exponents = self._write_exponents(heads)
        return self._exponents

    def _write_exponents(
        self, heads: Index
    ) -> tuple[gs.Tensor, gs.Tensor, list[gs.Tensor], gs.Tensor]:
        roles, leaf = self.roles, exponent_of(self.roles)
        time = roles.key_position
        if {*heads} != leaf.axes - {*roles.batch, *time}:
            raise NotAttentionError("a maximum is subtracted that differs within a head")
        inside = replace(leaf, function=leaf.function[2])
        grouped = self.grouped(inside, (roles.batch, time, heads))
        exponent = self.applied("", grouped, inside, heads, FLOAT)
        faded = [] if roles.decay is None else [self.decay(FLOAT)]
        if any(x.shape != exponent.shape for x in faded):
            raise NotAttentionError("a maximum is subtracted, and its decay differs in a head")
        zero = self.op.ConstantOfShape(self.op.Shape(exponent), shape=exponent.shape)
        summed = self._running_sum(faded[0], zero, heads) if roles.from_zero and faded else zero
        return exponent, zero, faded, summed

    def _stabilized_exp(self, queries: Sequence[gs.Tensor], heads: Index) -> list[gs.Variable]:
        """Return what the op makes of exponents of queries; all keys but the first are 0."""
        exponent, zero, faded, _ = self._exponents_of(heads)
        zeros = [zero] * (len(queries) - 1)
        sides = (queries, [exponent, *zeros], *([x, *zeros] for x in faded))
        query, key, *decays = (self._side_by_side(side, heads) for side in sides)
        none, count = gs.Variable.empty(), axis_size(heads)
        names = ("query_features", "key_features", "present_decay")
        made = [gs.Variable(self.name(n), FLOAT, query.shape) for n in names]
        attributes = {"q_num_heads": count, "k_num_heads": count}
        op, inputs = stabilized_exp.OP.name, [query, key, none, none, *decays]
        name = self.name(op)
        self.nodes.append(gs.Node(op, name, attributes, inputs, made, domain=DOMAIN))
        return made

    def feature(self, x: gs.Tensor, number: int, heads: Index) -> gs.Tensor:
        """Return one of the features that every head has, (B, T, heads)."""
        width = axis_size(heads)
        by_head = self.op.Reshape(x, [0, 0, width, static_size(x, 2) // width])
        return self.op.Gather(by_head, np.asarray(number), axis=3)

    def _side_by_side(self, features: Sequence[gs.Tensor], heads: Index) -> gs.Tensor:
        """Return several features of every head, (B, T, heads * features)."""
        columns = [self.op.Unsqueeze(x, [3]) for x in features]
        whole = self.op.Concat(*columns, axis=3)
        return self.op.Reshape(whole, [0, 0, len(features) * axis_size(heads)])

    def _running_sum(self, x: gs.Tensor, zero: gs.Tensor, heads: Index) -> gs.Tensor:
        """Return the sum over all tokens so far, (B, T, heads)."""
        count = axis_size(heads)
        ones = self.op.Add(zero, 1.0)
        # With q = k = 1 the sum over s <= t of (q_t . k_s) v_s is the running sum of v.
        attributes = {"q_num_heads": count, "kv_num_heads": count, "update_rule": "linear"}
        attributes |= {"causal": 1, "normalize": 0, "scale": 1.0, "eps": 0.0}
        op, name = linear_attention.OP.name, f"{self.root.name}/sum/LinearAttention"
        return self.add(op, [ones, ones, x], FLOAT, attrs=attributes, shape=x.shape, name=name)
