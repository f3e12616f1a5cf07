"""A sum over tokens that nothing is multiplied with -> ``CumulativeSum``.

    y[.., t, ..] = sum_{s <= t} v[.., s, ..]

As linear attention with a query and a key of 1 it would be a product of matrices for every value.
The op adds, and takes the tensor as it is, wherever its tokens are. It is written where it gives a
state: one batch, and fixed sizes besides the tokens. Any other such sum is as fast as it stands.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from linexport.match.emit.layout import written_size
from linexport.match.emit.outputs import Outputs
from linexport.match.emit.tokens import delayed_tokens
from linexport.match.errors import NotAttentionError
from linexport.match.forms.axes import Index, size_of
from linexport.match.forms.terms import Leaf
from linexport.match.roles.head_layout import axis_size
from linexport.match.roles.roles import Roles
from linexport.plugins.ops import cumulative_sum
from linexport.plugins.ops.op import DOMAIN


def is_sum(roles: Roles) -> bool:
    """Return whether roles are those of a sum of values, to earlier tokens or to later ones."""
    weighed = (roles.query, roles.key, roles.decay, roles.mask, roles.initial, roles.turn)
    other = roles.normalize or roles.delta or roles.stabilized or roles.transition
    return roles.causal and not any(weighed) and not other


class Sums(Outputs):
    """Writes sums of values."""

    def sum(self, dtype: np.dtype[np.generic]) -> gs.Node:
        """Write a sum, and the result, and return the node of the sum.

        Raises:
            NotAttentionError: it has no state of a fixed size.
        """
        roles = self.roles
        if roles.reverse:
            raise NotAttentionError("it is a sum over later tokens, which is not rewritten")
        made = self._dims()
        fixed = [size_of(group).known for group in made[1:] if group != roles.query_position]
        if None in fixed or len(roles.batch) > 1 or size_of(roles.query_position).known is not None:
            raise NotAttentionError(
                "it is a cumulative sum along one of several dynamic sizes, or along a fixed one: "
                "its state would have no fixed size, and the CumSum is kept"
            )
        place = made.index(roles.query_position)
        groups = (*made[:place], roles.key_position, *made[place + 1 :])
        if roles.value:
            x: gs.Tensor = self.packed_in(groups, roles.value, self.layout.value, dtype)
        else:
            # Without a value it counts tokens.
            ones = np.ones((1, 1, axis_size(groups[2])), dtype)
            x = self.everywhere(ones, groups[2], roles.key_position)
        if roles.lag > 1:
            # A sum up to t - k is that of values delayed by k.
            x = delayed_tokens(self, x, roles.lag)
        shape = [written_size(size_of(group)) for group in made]
        output = gs.Variable(self.name("output"), dtype=dtype, shape=shape)
        op = cumulative_sum.OP.name
        attributes = {"axis": place, "exclusive": int(roles.lag == 1)}
        node = gs.Node(op, f"{self.root.name}/{op}", attributes, [x], [output], domain=DOMAIN)
        self.nodes.append(node)
        result: gs.Tensor = output
        if self._has_more:
            result = self.weighted(self.post(result), made)
            for term in roles.bonus_terms:
                result = self.with_bonus(result, term, made)
        found = self.grouped(Leaf(result, made), self.form.dims)
        self.result = self.cast(found, np.dtype(self.root.dtype or result.dtype))
        return node

    def _dims(self) -> tuple[Index, ...]:
        """Return those of the root where they suit the op, else (B, T, all others)."""
        roles, own = self.roles, {*self.roles.batch, *self.roles.query_position}
        dims = tuple(self.form.dims)
        labels = {a for index in dims for a in index}
        rest = tuple(a for a in (*self.layout.output, *roles.widths) if a not in own)
        suits = dims[:1] == (roles.batch,) and roles.query_position in dims[1:]
        plain = roles.lag < 2 and not self._has_more
        if roles.value and suits and plain and labels >= {*rest, *own}:
            return dims
        return (roles.batch, roles.query_position, rest)

    @property
    def _has_more(self) -> bool:
        """Return whether factors or terms follow the sum."""
        roles = self.roles
        return bool(roles.weights or roles.bonus_terms or roles.post != 1.0 or roles.post_counts)
