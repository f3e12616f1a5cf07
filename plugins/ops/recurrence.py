"""A first-order recurrence of every channel in standard operators, all chunks of tokens at once.

    h_t = a_t * h_{t-1} + u_t

With p and A the same recurrence from nothing, and the product of the gains, of a chunk's tokens
c = 1 ... C:

    p_c = a_c * p_{c-1} + u_c,   A_c = a_c * A_{c-1}        token c of all chunks is one step
    S'  = A_C * S + p_C                                     a Scan over the chunks
    h_c = p_c + A_c * S

``*`` and ``+`` are a semiring's. No quotient is formed, so gains of any size are safe.
Source: Blelloch 1990, "Prefix sums and their applications", section 1.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from linexport.plugins.ops.body import Body, ceil_div

CHUNK = 8
"""Tokens of a chunk."""


@dataclass(frozen=True)
class Semiring:
    """Operators for ``*`` and ``+``; a gain and an addend that change nothing."""

    times: str
    plus: str
    one: float
    zero: float


SUMS = Semiring("Mul", "Add", 1.0, 0.0)


@dataclass(frozen=True)
class Recurrence:
    """Recurrences (B, T, width) with the same gains.

    Attributes:
        semiring: what ``*`` and ``+`` are.
        gains: (B, T, width); "" where all are one.
        width: channels.
    """

    semiring: Semiring
    gains: str
    width: int

    def write(self, b: Body, addends: Sequence[str], starts: Sequence[str]) -> list[str]:
        """Append h of all tokens and, behind these, the last (B, width) of every recurrence.

        Args:
            b: the body to append to.
            addends: u of each, (B, T, width).
            starts: the state before the first token of each, (B, width).
        """
        length = b.Shape(addends[0], start=1, end=2)
        one, several = Body(b), Body(b)
        found = b.If(
            b.Equal(b.Squeeze(length, b.const([0])), b.const(1)),
            outputs=2 * len(addends),
            then_branch=one.subgraph("one", [], self._one(one, addends, starts)),
            else_branch=several.subgraph("several", [], self._several(several, addends, starts)),
        )
        return list(found)

    def _times(self, b: Body, x: str, y: str) -> str:
        return str(b.node(self.semiring.times, x, y))

    def _plus(self, b: Body, x: str, y: str) -> str:
        return str(b.node(self.semiring.plus, x, y))

    def _step(self, b: Body, gain: str, state: str, addend: str) -> str:
        return self._plus(b, self._times(b, gain, state) if gain else state, addend)

    def _one(self, b: Body, addends: Sequence[str], starts: Sequence[str]) -> list[str]:
        """One token: the recurrence as it is."""
        axis = b.const([1])
        after = [
            self._step(b, self.gains, b.Unsqueeze(start, axis), addend)
            for addend, start in zip(addends, starts, strict=True)
        ]
        # Not Squeeze: where the length is known, it is checked in the branch that is not taken.
        return [*after, *(b.ReduceSum(h, axis, keepdims=0) for h in after)]

    def _several(self, b: Body, addends: Sequence[str], starts: Sequence[str]) -> list[str]:
        """Chunks of tokens, the last one filled up; no token is a chunk as well."""
        batch, length = b.Shape(addends[0], start=0, end=1), b.Shape(addends[0], start=1, end=2)
        count = b.Max(ceil_div(b, length, CHUNK), b.const([1]))
        size = b.const([CHUNK])
        missing = b.Sub(b.Mul(count, size), length)
        pads, axis = b.Concat(b.const([0]), missing, axis=0), b.const([1])
        shape = b.Concat(batch, count, b.const([CHUNK, self.width]), axis=0)

        def by_token(x: str, fill: float) -> list[str]:
            chunks = b.Reshape(b.Pad(x, pads, b.const(fill), axis), shape)
            return list(b.Split(chunks, outputs=CHUNK, axis=2, num_outputs=CHUNK))

        gains = by_token(self.gains, self.semiring.one) if self.gains else [""] * CHUNK
        products = gains[:1]
        for gain in gains[1:]:
            products.append(gain and self._times(b, gain, products[-1]))
        tokens, lasts = [], []
        for addend, start in zip(addends, starts, strict=True):
            sums: list[str] = []
            for gain, u in zip(gains, by_token(addend, self.semiring.zero), strict=True):
                sums.append(self._step(b, gain, sums[-1], u) if sums else u)
            before, last = self._carried(b, products[-1], sums[-1], start)
            inside = b.Concat(*sums, axis=2)
            grown = b.Concat(*products, axis=2) if self.gains else ""
            found = self._step(b, grown, before, inside)
            joined = b.Reshape(found, b.Concat(batch, b.const([-1, self.width]), axis=0))
            tokens.append(b.Slice(joined, b.const([0]), length, axis))
            lasts.append(last)
        return [*tokens, *lasts]

    def _carried(self, b: Body, product: str, addend: str, start: str) -> tuple[str, str]:
        """The states before all chunks (B, N, 1, width), and that behind the last (B, width)."""
        cell = Body(b)
        S, p, a = (cell.fresh(name) for name in ("S", "p", "a"))
        after = self._step(cell, a if product else "", S, p)
        axis = b.const([2])
        given = [b.Transpose(b.Squeeze(x, axis), perm=[1, 0, 2]) for x in (addend, product) if x]
        last, before = b.Scan(
            start,
            *given,
            outputs=2,
            body=cell.subgraph("chunk", [S, p, a][: 1 + len(given)], [after, cell.Identity(S)]),
            num_scan_inputs=len(given),
        )
        return b.Unsqueeze(b.Transpose(before, perm=[1, 0, 2]), axis), last
