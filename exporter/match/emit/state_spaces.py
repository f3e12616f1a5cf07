"""A convolution with a sum of exponentials as the inputs of ``DiagonalStateSpace``.

    y_t = sum_{s <= t, n} exp(a_n (t - s)) (c_n cos b_n (t - s) - d_n sin b_n (t - s)) u_s

Rates a, angles b in turns, and c and d are computed from weights alone, a number for each channel n
of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs

from linexport.match.emit.decay import FLOAT
from linexport.match.emit.layout import written_size
from linexport.match.emit.signed_decay import SignedGates
from linexport.match.errors import NotAttentionError
from linexport.match.forms.axes import size_of
from linexport.match.forms.terms import Iota, Leaf, Term
from linexport.match.roles.decay import read_decay
from linexport.match.roles.head_layout import axis_size
from linexport.match.roles.roles import Turn
from linexport.plugins.ops import diagonal_state_space
from linexport.plugins.ops.op import DOMAIN

DOUBLE = np.dtype(np.float64)


class StateSpaces(SignedGates):
    """Writes state spaces that are the same for all tokens."""

    def state_space(self, dtype: np.dtype[np.generic], signed: gs.Tensor | None) -> gs.Node | None:
        """Return the node of such a convolution, not yet among those written; None of others.

        Args:
            dtype: of its input and output.
            signed: decays that may be negative.

        Raises:
            NotAttentionError: its channels rotate, and it is not such a convolution.
        """
        roles, heads = self.roles, self.layout.value
        rate = self._constant_rates() if signed is None else None
        if rate is None:
            if roles.turn is not None:
                raise NotAttentionError(
                    "its channels turn, and their decays may be negative or differ from token to "
                    "token"
                )
            return None
        weights = (Term(1.0, roles.query),) if roles.turn is None else roles.turn.cosines
        inputs = [
            self.packed("value", roles.value, heads, roles.widths, dtype),
            rate,
            self._stored(weights, FLOAT),
            *(() if roles.turn is None else self._turning(roles.turn)),
        ]
        groups = (roles.batch, roles.query_position, (*heads, *roles.widths))
        shape = [written_size(size_of(group)) for group in groups]
        output = gs.Variable(self.name("output"), dtype=dtype, shape=shape)
        op = diagonal_state_space.OP.name
        return gs.Node(op, f"{self.root.name}/{op}", {}, inputs, [output], domain=DOMAIN)

    def _constant_rates(self) -> gs.Tensor | None:
        """Return the rates of channels that are the same for all tokens, (heads, channels).

        None if they differ, or if the match is not a convolution.
        """
        roles, heads = self.roles, self.layout.value
        other = roles.key or roles.normalize or roles.lag or roles.initial or roles.stabilized
        if roles.decay is None or other:
            return None
        found = read_decay(roles, heads)
        # X_t = c t, with c of heads and channels, is the same decay at every token.
        counted = Iota(roles.query_position) in roles.decay.factors
        steady = all(f.axes <= {*heads, *roles.channels} for f in found.leaves)
        if not ((found.width or roles.turn) and counted and steady):
            return None
        return self._stored([Term(found.coefficient, found.leaves)], FLOAT)

    def _turning(self, turn: Turn) -> tuple[gs.Tensor, gs.Tensor]:
        """Return d, and angles in turns.

        Raises:
            NotAttentionError: an angle is not a multiple of positions.
        """
        others = [f for f in turn.angle.factors if not isinstance(f, Leaf)]
        if others != [Iota(self.roles.query_position)]:
            raise NotAttentionError("its angles are no multiples of positions")
        # Re((c + i d) e^{ix}) = c cos x - d sin x
        sines = [term.scaled(-1.0) for term in turn.sines]
        angle = self._stored([turn.angle], DOUBLE)
        turns = gs.Constant(self.name("number"), np.asarray(0.5 / math.pi, DOUBLE))
        in_turns = self.add("Mul", [angle, turns], DOUBLE, shape=angle.shape)
        return self._stored(sines, FLOAT), in_turns

    def _stored(self, terms: Sequence[Term], dtype: np.dtype[np.generic]) -> gs.Tensor:
        """Return a sum of products of stored numbers, (heads, channels).

        Raises:
            NotAttentionError: they are of something else as well.
        """
        heads, groups = self.layout.value, (self.layout.value, self.roles.channels)
        sizes = [axis_size(group) for group in groups]
        total: gs.Tensor = gs.Constant(self.name("none"), np.zeros(sizes, dtype))
        for place, term in enumerate(terms):
            leaves: list[Leaf] = term.of(Leaf)
            if any(not f.axes <= {*heads, *self.roles.channels} for f in leaves):
                raise NotAttentionError("its kernel differs from token to token")
            x: gs.Tensor = gs.Constant(self.name("number"), np.full(sizes, term.coefficient, dtype))
            if leaves:
                product = self.packed_in(groups, leaves, heads, dtype)
                scaled = term.coefficient != 1.0
                x = self.add("Mul", [product, x], dtype, shape=sizes) if scaled else product
            total = self.add("Add", [total, x], dtype, shape=sizes) if place else x
        return total
