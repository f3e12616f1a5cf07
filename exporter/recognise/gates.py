"""Decays, and exponents whose running maximum is subtracted, as nodes.

    exp(i_s - m_s), g_t + m_{t-1} - m_t  and  exp(-m_t)    from    StabilizedExp(i, g)

of two features, the exponent and 0: those of a query, exp(m_t - M) and exp(-M) with
M = max(m_t, 0), have the quotient exp(-m_t).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from linexport.plugins.ops import stabilized_exp
from linexport.plugins.ops.op import DOMAIN
from linexport.recognise import decay
from linexport.recognise.axes import Index, size_of
from linexport.recognise.factors import Factors
from linexport.recognise.head_layout import axis_size
from linexport.recognise.maximum import exponent_of
from linexport.recognise.nodes import written_size
from linexport.recognise.roles import NotAttentionError

FLOAT = np.dtype(np.float32)


class Gates(Factors):
    """Writes what fades and what is kept from overflowing."""

    def everywhere(self, row: np.ndarray, heads: Index, time: Index) -> gs.Variable:
        """Numbers of the heads, (1, 1, heads), repeated for every token."""
        x, groups = gs.Constant(self.name("row"), row), (self.roles.batch, time, heads)
        shape = [written_size(size_of(group)) for group in groups]
        return self.add("Expand", [x, self.shape_of(groups)], row.dtype, shape=shape)

    def decay(self, dtype: np.dtype[np.generic]) -> gs.Variable:
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
        factor = gs.Constant(self.name("factor"), np.asarray(found.coefficient, dtype))
        return self.add("Mul", [x, factor], dtype, shape=x.shape)

    def stabilized(self, heads: Index) -> list[gs.Variable]:
        """Return query features, key features and decays of pairs, (B, T, heads * 2) each.

        Raises:
            NotAttentionError: exponents and decays are not those of these heads.
        """
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
        count, rank = axis_size(heads), [len(exponent.shape)]
        shape = self.add("Shape", [exponent], np.dtype(np.int64), shape=rank)
        zero = self.add("ConstantOfShape", [shape], FLOAT, shape=exponent.shape)
        query, key, *decays = (self._pair(x, zero, heads) for x in (zero, exponent, *faded))
        none = gs.Variable.empty()
        names = ("query_features", "key_features", "present_decay")
        made = [gs.Variable(self.name(n), FLOAT, query.shape) for n in names]
        attributes = {"q_num_heads": count, "k_num_heads": count}
        op, inputs = stabilized_exp.OP.name, [query, key, none, none, *decays]
        name = f"{self.root.name}/{op}"
        self.nodes.append(gs.Node(op, name, attributes, inputs, made, domain=DOMAIN))
        return made

    def feature(self, x: gs.Variable, number: int, heads: Index) -> gs.Variable:
        """Return the first (0) or the second (1) of pairs, (B, T, heads)."""
        shape = [*x.shape[:2], axis_size(heads)]
        split = gs.Constant(self.name("shape"), np.asarray([0, 0, shape[2], 2], np.int64))
        apart = self.add("Reshape", [x, split], FLOAT, shape=[*shape, 2])
        index = gs.Constant(self.name("index"), np.asarray(number, np.int64))
        return self.add("Gather", [apart, index], FLOAT, attrs={"axis": 3}, shape=shape)

    def _pair(self, x: gs.Tensor, y: gs.Tensor, heads: Index) -> gs.Variable:
        """Return features of two for every head, (B, T, heads * 2)."""
        last = gs.Constant(self.name("axes"), np.asarray([3], np.int64))
        shape = [*x.shape, 1]
        x, y = (self.add("Unsqueeze", [z, last], FLOAT, shape=shape) for z in (x, y))
        both = self.add("Concat", [x, y], FLOAT, attrs={"axis": 3}, shape=[*shape[:3], 2])
        width = 2 * axis_size(heads)
        packed = gs.Constant(self.name("shape"), np.asarray([0, 0, width], np.int64))
        return self.add("Reshape", [both, packed], FLOAT, shape=[*shape[:2], width])
