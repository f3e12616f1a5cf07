"""Roles with a transition as nodes: GeneralizedDeltaRule between packed inputs and an output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from linexport.match.emit.attention import MatchWriter
from linexport.match.emit.layout import written_size
from linexport.match.emit.tokens import delayed_logarithms, delayed_tokens
from linexport.match.forms.axes import Index, size_of
from linexport.match.forms.terms import Form, Leaf
from linexport.match.roles import decay
from linexport.match.roles.head_layout import HeadLayout, axis_size
from linexport.match.roles.roles import Roles
from linexport.plugins.ops import generalized_delta_rule
from linexport.plugins.ops.op import DOMAIN

DECAY = generalized_delta_rule.INPUTS.index("decay")


class TransitionWriter(MatchWriter):
    """Writes the nodes that take the place of a loop with a transition."""

    def __init__(self, root: gs.Variable, form: Form, roles: Roles) -> None:
        super().__init__(root, form, roles)
        assert roles.transition is not None
        self.transition, heads = roles.transition, roles.transition.heads
        self.layout = HeadLayout(heads, heads, heads, heads)

    def write(self) -> gs.Node:
        """Write all nodes and return the fused one.

        Raises:
            NotAttentionError: heads or widths are not fixed.
        """
        roles, given, dtype = self.roles, self.transition, self.dtype()
        b = self._vectors(given.writes, roles.channels, dtype)
        factor = gs.Constant(self.name("factor"), np.asarray(given.factor, dtype))
        b = b if given.factor == 1.0 else self.add("Mul", [b, factor], dtype, shape=b.shape)
        inputs = [
            self._vectors(roles.query, roles.channels, dtype),
            self._vectors(roles.key, roles.channels, dtype),
            self._vectors(roles.value, roles.widths, dtype),
            self._faded(dtype),
            self._vectors(given.reads, roles.channels, dtype),
            b,
        ]
        if roles.lag:  # what is read has seen the tokens before
            inputs[1:] = [
                (delayed_logarithms if place == DECAY else delayed_tokens)(self, x)
                for place, x in enumerate(inputs[1:], 1)
            ]
        heads, time = given.heads, roles.query_position
        packed = (roles.batch, time, (*heads, *roles.widths))
        shape = [written_size(size_of(group)) for group in packed]
        output = gs.Variable(self.name("output"), dtype=dtype, shape=shape)
        name = generalized_delta_rule.OP.name
        attributes = {"num_heads": axis_size(heads), "scale": 1.0}
        node = f"{self.root.name}/{name}"
        fused = gs.Node(name, node, attributes, inputs, [output], domain=DOMAIN)
        self.nodes.append(fused)
        self.restore(self.post(output))
        return fused

    def _vectors(
        self, leaves: Sequence[Leaf], width: Index, dtype: np.dtype[np.generic]
    ) -> gs.Tensor:
        """Return a product of factors as (B, T, heads * width); of none, ones."""
        heads, time = self.transition.heads, self.roles.key_position
        if leaves and any({*self.roles.query_position} & f.axes for f in leaves):
            time = self.roles.query_position
        groups = (self.roles.batch, time, (*heads, *width))
        if not leaves:
            return self._numbers(1.0, width, dtype)
        return self.packed_in(groups, leaves, heads, dtype)

    def _faded(self, dtype: np.dtype[np.generic]) -> gs.Tensor:
        """Return logarithms of the rates of all channels."""
        roles, heads = self.roles, self.transition.heads
        if roles.decay is None:
            # log 1 = 0: the state does not fade.
            return self._numbers(0.0, roles.channels, dtype)
        found = decay.read_decay(roles, heads)
        if not found.leaves:
            return self._numbers(found.coefficient, roles.channels, dtype)
        groups = (roles.batch, found.time, (*heads, *roles.channels))
        x = self.packed_in(groups, found.leaves, heads, dtype)
        if found.coefficient == 1.0:
            return x
        factor = gs.Constant(self.name("factor"), np.asarray(found.coefficient, dtype))
        return self.add("Mul", [x, factor], dtype, shape=x.shape)

    def _numbers(self, number: float, width: Index, dtype: np.dtype[np.generic]) -> gs.Tensor:
        """Return a number as (B, T, heads * width)."""
        group = (*self.transition.heads, *width)
        row = np.full((1, 1, axis_size(group)), number, dtype)
        return self.everywhere(row, group, self.roles.query_position)
