"""Axes of the batch and of the tokens, and which sessions a call of the model may join.

    (1, ...) of each session  --stack-->  (B, ...)  --model-->  (B, ...)  --own-->  (1, ...)

Sessions share a call if their pieces have one length T and their states agree in what has no
batch axis: the tokens counted (``past_length``), or the length of a state that grows. Where the
model has a padding mask, states that grow may differ in length: the shorter ones begin with rows
of zeros, and zeros in the mask say that these are padding.

A model of packed batches takes pieces of any lengths, side by side: (1, n, ...), n tokens in all.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np

from linexport.artifact.call_inputs import Arrays
from linexport.artifact.runtime import Artifact
from linexport.errors import UsageError
from linexport.graph.states import LENGTH, PADDING
from linexport.system.untyped import ArrayLike
from linexport.targets.runtime.device_array import DeviceArray


class Layout:
    """Stacking and splitting for one model.

    Attributes:
        most: number of sessions a call may join at most.
        longest: tokens of a call at most; None where nothing bounds them.
        packed: how the model takes packed batches; None for rows.

    Raises:
        UsageError: the batch of the model is fixed at more than one.
    """

    def __init__(self, model: Artifact) -> None:
        states, dims = list(model.states.values()), model.manifest.dims
        held = {name for s in states for name in (s.past, s.present)}
        batch = states[0].shape[0]
        if isinstance(batch, int) and batch != 1:
            raise UsageError(
                f"{model.path} takes {batch} rows in every call; a pool needs one row a session. "
                "Convert the model with a dynamic batch."
            )
        records = [*model.manifest.inputs, *model.manifest.outputs]
        shapes = {r.name: r.shape for r in records if r.name not in held}
        self._states = model.states
        self._rows = {n: s.index(batch) for n, s in shapes.items() if batch in s}
        self._masked = any(s.op == PADDING for s in states)
        self.longest, self._axis = model.longest, model.token_axis
        self.packed = model.manifest.packed
        alone = isinstance(batch, int) or len(self._rows) < len(shapes)
        limit = 1 if alone else dims[str(batch)].max
        self.most = limit or 2**31

    def joins(self, state: Mapping[str, np.ndarray], tokens: int) -> Hashable:
        """Return what must be equal in sessions that share a call, of state and tokens to come."""
        counted = [int(state[LENGTH[0]][0])] if LENGTH[0] in state else []
        length = [tokens] if self.packed is None else []
        return *length, *counted, *([] if self._masked else self._lengths(state))

    def stack_inputs(self, feeds: Sequence[Arrays]) -> Arrays:
        """Return the inputs of a call of these sessions."""
        if len(feeds) == 1:
            return feeds[0]
        if self.packed is not None:
            ends = np.cumsum([0, *map(self._axis.length, feeds)], dtype=np.int32)
            return {**self._axis.join(feeds), self.packed.ends: ends}
        return {n: np.concatenate([f[n] for f in feeds], self._rows[n]) for n in feeds[0]}

    def is_row(self, name: str) -> bool:
        """Return whether a state has one row a session, of a fixed size."""
        return name != LENGTH[0] and self._states[name].growing_axis is None

    def grows(self, name: str) -> bool:
        """Return whether a state gets longer with every token."""
        return self._states[name].growing_axis is not None

    def rows(self, rest: Mapping[str, np.ndarray]) -> int:
        """Return the length of the states that grow."""
        return max(self._lengths(rest), default=0)

    def stack_rest(self, states: Sequence[Arrays]) -> Arrays:
        """Return the states that are no rows of sessions, stacked and padded to the longest."""
        if len(states) == 1:
            return states[0]
        return {name: self._stacked(name, [s[name] for s in states]) for name in states[0]}

    def own(self, stacked: Arrays, index: int, length: int) -> Arrays:
        """Return the states of one session in ``stack_rest``, without padding."""
        found = {}
        for name, values in stacked.items():
            axis = self._states[name].growing_axis
            if axis is not None:
                padding = values.shape[axis] - length
                values = _without(values[index : index + 1], axis, padding)
            found[name] = values
        return found

    def outputs(self, outputs: Arrays, lengths: Sequence[int]) -> list[Arrays]:
        """Return the outputs of each session of a call; ``lengths`` are their tokens."""
        rows = len(lengths)
        if rows == 1:
            return [outputs]
        if self.packed is not None:
            ends = [0, *accumulate(lengths)]
            pieces = (self._axis.cut(outputs, *place) for place in pairwise(ends))
            return [{name: values.copy() for name, values in piece.items()} for piece in pieces]
        parts = {n: np.split(values, rows, self._rows[n]) for n, values in outputs.items()}
        return [{n: part[row].copy() for n, part in parts.items()} for row in range(rows)]

    def _lengths(self, state: Mapping[str, np.ndarray]) -> list[int]:
        return [
            state[name].shape[s.growing_axis]
            for name, s in self._states.items()
            if s.growing_axis is not None and name in state
        ]

    def _stacked(self, name: str, values: Sequence[np.ndarray]) -> np.ndarray:
        axis = self._states[name].growing_axis
        if name == LENGTH[0]:
            return values[0]
        assert axis is not None
        shape = list(values[0].shape)
        shape[0], shape[axis] = len(values), max(v.shape[axis] for v in values)
        return _joined(values, shape, axis)


def _without(values: np.ndarray, axis: int, padding: int) -> ArrayLike:
    """Return a state without the padding it begins with: a view, on a device a copy there."""
    if isinstance(values, DeviceArray):
        return values.narrowed(axis, padding)
    return values[(slice(None),) * axis + (slice(padding, None),)]


def _joined(values: Sequence[ArrayLike], shape: Sequence[int], axis: int) -> ArrayLike:
    """Return rows in one array, each at the end along an axis, and zeros before it."""
    first = values[0]
    if isinstance(first, DeviceArray):
        made = DeviceArray(first.device, tuple(shape), first.dtype)
        made.clear()
        for row, value in enumerate(values):
            made[row : row + 1].write_end(axis, value)
        return made
    joined = np.zeros(shape, first.dtype)
    for row, value in enumerate(values):
        start = shape[axis] - value.shape[axis]
        np.moveaxis(joined[row : row + 1], axis, 0)[start:] = np.moveaxis(value, axis, 0)
    return joined
