"""Decays that may be negative, as signs around a recurrence whose decays are not, as nodes.

    h_t = a_t h_{t-1} + b_t,    c_t = sgn(a_{t+1}) ... sgn(a_T),    c_T = 1,    sgn(0) = 1
    g_t = c_t h_t    is    g_t = |a_t| g_{t-1} + c_t b_t,    g_0 = c_0 h_0,    g_T = h_T

because c_t a_t = c_{t-1} |a_t|. Negative decays are counted, so that signs are exact. As c_T is 1,
the state that is carried on is h itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.tensors import known_shape
from linexport.match.emit.decay import Gates
from linexport.match.emit.tokens import scaled_tokens
from linexport.match.errors import NotAttentionError
from linexport.match.forms.axes import Index
from linexport.match.forms.sign_analysis import sign_of
from linexport.match.forms.terms import Leaf
from linexport.match.roles.decay import read_decay
from linexport.match.roles.head_layout import axis_size
from linexport.match.roles.roles import Roles
from linexport.plugins.ops.linear_attention import INPUTS

COUNT, LARGE, STATE = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32)


@dataclass(frozen=True)
class Signs:
    """Signs of the products of later decays.

    Attributes:
        later: c_t, (B, T, heads) or (B, T, heads * channels).
        all: c_0, without the tokens.
        by_channel: every channel of a key has its own.
        of_keys: queries and keys have them, and values and outputs do not.
    """

    later: gs.Tensor
    all: gs.Tensor
    by_channel: bool
    of_keys: bool


def signed_rate(roles: Roles, heads: Index) -> Leaf | None:
    """Return the decay that the logarithm in the roles is of, where it may be below 0."""
    found = read_decay(roles, heads)
    if len(found.leaves) != 1 or found.coefficient != 1.0 or found.leaves[0].function[0] != "Log":
        return None
    (leaf,) = found.leaves
    rate = replace(leaf, function=leaf.function[2])
    return None if sign_of(rate) == 1 else rate


class SignedGates(Gates):
    """Writes decays of either sign.

    Attributes:
        takes_logarithms: the nodes that are replaced do, so that their decays are positive.
    """

    takes_logarithms = False

    def rates(self, dtype: np.dtype[np.generic]) -> gs.Tensor | None:
        """Return decays that may be negative, (B, T, heads) or (B, T, heads * channels).

        None where they are not, or are none.
        """
        roles, heads = self.roles, self.layout.value
        if roles.decay is None or roles.stabilized or self.takes_logarithms:
            return None
        rate = signed_rate(roles, heads)
        if rate is None:
            return None
        self.has_signs = True
        found = read_decay(roles, heads)
        groups = (roles.batch, found.time, (*heads, *found.width))
        return self.packed_in(groups, (rate,), heads, dtype)

    def logarithms_of_sizes(self, rates: gs.Tensor) -> gs.Tensor:
        """Return log |a|, which is -inf where a is 0."""
        return self.op.Log(self.op.Abs(rates))

    def signs(self, rates: gs.Tensor) -> Signs:
        """Return the signs of the products of later decays."""
        dtype, width = np.dtype(rates.dtype), known_shape(rates)[2]
        # A product is negative if an odd number of its factors is; integers count them exactly.
        count = self.cast(self.op.Less(rates, 0.0), COUNT)
        # Exclusive and from the end: over the tokens after t.
        later = self.op.CumSum(count, np.asarray(1, LARGE), exclusive=1, reverse=1)
        all_of_them = self.op.ReduceSum(count, [1], keepdims=0)
        by_channel = width != axis_size(self.layout.value)
        first, second = (self._parity(n, dtype) for n in (later, all_of_them))
        # A normaliser is a sum of keys, which must have the signs then.
        return Signs(first, second, by_channel, by_channel or self.roles.normalize)

    def _parity(self, count: gs.Tensor, dtype: np.dtype[np.generic]) -> gs.Tensor:
        """Return (-1)^n."""
        odd = self.cast(self.op.Mod(count, 2), np.dtype(bool))
        return self.op.Where(odd, *(np.asarray(sign, dtype) for sign in (-1, 1)))

    def turned(self, inputs: Sequence[gs.Tensor], signs: Signs) -> list[gs.Tensor]:
        """Return query, key and value of g.

        Raises:
            NotAttentionError: heads that have signs of their own share queries or keys.
        """
        query, key, value = inputs
        if not signs.of_keys:
            return [query, key, self._scaled(value, signs)]
        heads = self.layout.value
        # Queries of one head are side by side, and so have its signs.
        queries = self.layout.query if signs.by_channel else self.layout.query[: len(heads)]
        if queries != heads or self.layout.key != heads:
            raise NotAttentionError("its decay may be negative, and heads share queries or keys")
        return [self._scaled(query, signs), self._scaled(key, signs), value]

    def turned_back(self, output: gs.Tensor, signs: Signs) -> gs.Tensor:
        """Return h of g, unless queries have the signs already."""
        return output if signs.of_keys else self._scaled(output, signs)

    def turned_pasts(self, signs: Signs) -> dict[int, gs.Tensor]:
        """Return g_0 of h_0 = 0 for each state of the operator, by the number of the input."""
        channels, width = (
            axis_size(i) if i else 1 for i in (self.roles.channels, self.roles.widths)
        )
        pasts: dict[int, tuple[int, ...]] = {INPUTS.index("past_state"): (channels, width)}
        if self.roles.normalize:
            pasts[INPUTS.index("past_normalizer")] = (channels,)
        return {place: self._turned_past(signs, own) for place, own in pasts.items()}

    def _turned_past(self, signs: Signs, own: tuple[int, ...]) -> gs.Tensor:
        """Return c_0 times zeros of (batch, heads, *own), in the type of states."""
        batch = known_shape(signs.all)[0]
        heads, ones = axis_size(self.layout.value), [1] * (len(own) - 1)
        split = [heads, own[0] if signs.by_channel else 1, *ones]
        turn = self.cast(self.op.Reshape(signs.all, [0, *split]), STATE)
        sizes = self.op.Concat(self.shape_of((self.roles.batch,)), [heads, *own], axis=0)
        zero = np.zeros([1] * (2 + len(own)), STATE)
        past = self.op.Expand(zero, sizes, shape=[batch, heads, *own])
        return self.op.Mul(past, turn)

    def _scaled(self, x: gs.Tensor, signs: Signs) -> gs.Tensor:
        heads = axis_size(self.layout.value)
        return scaled_tokens(self, x, signs.later, heads)
