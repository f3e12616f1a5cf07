"""Pairs of numbers in the states of a loop: where their parts are, splitting and joining them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.dims import Shape
from linexport.match.emit.complex_diagonal import LARGE, Pair, Turns


@dataclass(frozen=True)
class StatePairs:
    """Where the parts of a state's pairs are.

    Attributes:
        shape: of one part, at a step.
        axis: of the only state, of which the first half are real; None of two states.
        alternate: its even entries are, instead.
    """

    shape: Shape
    axis: int | None = None
    alternate: bool = False

    def basis(self, dtype: np.dtype[np.generic], stem: str) -> list[gs.Tensor | None]:
        """Return states whose real parts are 1; ``stem`` begins the name of the numbers."""
        # A batch of 1 is broadcast: the basis is the same for all sequences.
        ones = np.ones([1, *map(int, self.shape[1:])], dtype)
        if self.axis is None:
            return [gs.Constant(f"{stem}/one", ones), None]
        both = [ones, np.zeros_like(ones)]
        if self.alternate:
            entries = np.stack(both, self.axis + 1).reshape(1, *map(int, self._whole(1)[1:]))
        else:
            entries = np.concatenate(both, self.axis)
        return [gs.Constant(f"{stem}/one", entries)]

    def parts(
        self, states: Sequence[gs.Tensor | None], stem: str
    ) -> tuple[list[gs.Node], list[gs.Tensor | None]]:
        """Return nodes of a step that split states into parts, and their outputs."""
        if self.axis is None:
            return [], list(states)
        (state,) = states
        if state is None:
            return [], [None, None]
        size = int(self.shape[self.axis])
        ends = (
            ((0, 2 * size, 2), (1, 2 * size, 2))
            if self.alternate
            else ((0, size, 1), (size, 2 * size, 1))
        )
        nodes, found = list[gs.Node](), list[gs.Tensor | None]()
        for place, (start, end, step) in enumerate(ends):
            given = [
                gs.Constant(f"{stem}/{name}_{place}", np.asarray([n], LARGE))
                for name, n in (("start", start), ("end", end), ("axis", self.axis), ("step", step))
            ]
            shape = [*(state.shape or self.shape)[:1], *self.shape[1:]]
            part = gs.Variable(f"{stem}/part_{place}", state.dtype, shape)
            nodes.append(gs.Node("Slice", part.name, {}, [state, *given], [part]))
            found.append(part)
        return nodes, found

    def joined(self, turns: Turns, parts: Pair) -> list[gs.Tensor]:
        """Return states of all tokens, (T, *state), from parts (B, T, N)."""
        sizes, perm = [0, 0, *map(int, self.shape[1:])], [1, 0, *range(2, len(self.shape) + 1)]
        first, whole = list[gs.Tensor](), [turns.length, turns.batch, *self.shape[1:]]
        for part in parts:
            first.append(turns.op.Transpose(turns.op.Reshape(part, sizes), perm=perm, shape=whole))
        if self.axis is None:
            return first
        axis = self.axis + 1 + self.alternate
        if not self.alternate:
            return [turns.op.Concat(*first, axis=axis)]
        both = turns.op.Concat(*(turns.op.Unsqueeze(x, [axis]) for x in first), axis=axis)
        return [turns.op.Reshape(both, [0, 0, *map(int, self._whole(turns.batch)[1:])])]

    def _whole(self, batch: int | str) -> list[int | str]:
        shape = [batch, *self.shape[1:]]
        assert self.axis is not None
        shape[self.axis] = 2 * int(shape[self.axis])
        return shape


def layouts(loop: gs.Node) -> Iterator[StatePairs]:
    """Yield where pairs may be in the states of a loop."""
    count = len(loop.inputs) - loop.attrs["num_scan_inputs"]
    first, *others = (list(t.shape) for t in loop.attrs["body"].inputs[:count])
    if any(isinstance(n, str) for n in first[1:]):
        return
    if others:
        if others[0] == first:
            yield StatePairs(first)
        return
    for axis in range(len(first) - 1, 0, -1):
        if first[axis] % 2 == 0:
            half = [*first[:axis], first[axis] // 2, *first[axis + 1 :]]
            yield StatePairs(half, axis)
            # Of two entries the first half is the even one.
            if first[axis] > 2:
                yield StatePairs(half, axis, alternate=True)
