"""A model of packed batches, called with rows of one length or with sequences side by side.

    (B, ..., T, ...)  -->  (1, ..., B T, ...) and cu_seqlens (0, T, ... B T)  -->  (B, ..., T, ...)

Inputs among which there is ``cu_seqlens`` are side by side already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from linexport.manifest.records import TOKENS
from linexport.system.untyped import ArrayLike
from linexport.targets.base import OrtSession
from linexport.targets.lowering.packed_batches import ENDS


def by_rows(session: OrtSession) -> OrtSession | PackedSession:
    """Return the session of a model that takes rows; one of any other model as it is."""
    takes = {i.name for i in session.inner.get_inputs()}
    return PackedSession(session) if ENDS in takes else session


class PackedSession:
    """A ``DeviceSession`` of a model of packed batches.

    Args:
        session: of it.

    Attributes:
        inner, native, placement: those of the session.
        hold, empty, array, close: likewise.
        axes: that of the tokens, by input and output that has one.
    """

    def __init__(self, session: OrtSession) -> None:
        self._session = session
        self.inner, self.native, self.placement = session.inner, session.native, session.placement
        self.hold, self.empty, self.array = session.hold, session.empty, session.array
        self.close = session.close
        infos = (*self.inner.get_inputs(), *self.inner.get_outputs())
        self.axes = {i.name: i.shape.index(TOKENS) for i in infos if TOKENS in i.shape}

    def run(self, inputs: Mapping[str, ArrayLike]) -> dict[str, ArrayLike]:
        """See ``InferenceSession``."""
        return self._called(self._session.run, inputs)

    def run_into(
        self, inputs: Mapping[str, object], arrays: Mapping[str, object]
    ) -> dict[str, object]:
        """See ``OutputWriter``; the outputs that have arrays are states."""
        return self._called(lambda given: self._session.run_into(given, arrays), inputs)

    def length(self, inputs: Mapping[str, ArrayLike]) -> int:
        """Return the number of tokens of inputs."""
        name = next(name for name in inputs if name in self.axes)
        return int(inputs[name].shape[self.axes[name]])

    def run_sequences(self, given: Sequence[Mapping[str, object]]) -> list[dict[str, ArrayLike]]:
        """Return the outputs of sequences of any lengths, computed side by side in one call.

        Args:
            given: inputs of each, states among them, as for a batch of one.
        """
        if not given:
            return []
        ends = np.cumsum([0, *map(self.length, given)])
        fed = {
            name: np.concatenate([one[name] for one in given], self.axes.get(name, 0))
            for name in given[0]
        }
        outputs = self._session.run({**fed, ENDS: ends.astype(np.int32)})
        cuts = {n: ends[1:-1] if n in self.axes else len(given) for n in outputs}
        parts = {n: np.split(x, cuts[n], self.axes.get(n, 0)) for n, x in outputs.items()}
        return [{n: part[row] for n, part in parts.items()} for row in range(len(given))]

    def _called(
        self,
        call: Callable[[Mapping[str, object]], dict[str, object]],
        inputs: Mapping[str, object],
    ) -> dict[str, ArrayLike]:
        if ENDS in inputs:
            return call(inputs)
        rows = {name: np.asarray(x) for name, x in inputs.items() if name in self.axes}
        name, first = next(iter(rows.items()))
        batch, length = first.shape[0], first.shape[self.axes[name]]
        ends = np.arange(batch + 1, dtype=np.int32) * length
        outputs = call({**inputs, **{n: self._joined(n, x) for n, x in rows.items()}, ENDS: ends})
        return {n: self._split(n, x, batch) for n, x in outputs.items()}

    def _joined(self, name: str, rows: np.ndarray) -> np.ndarray:
        axis = self.axes[name]
        first = np.moveaxis(rows, axis, 1)
        joined = first.reshape(1, -1, *first.shape[2:])
        return np.ascontiguousarray(np.moveaxis(joined, 1, axis))

    def _split(self, name: str, values: ArrayLike, batch: int) -> ArrayLike:
        if name not in self.axes:
            return values
        axis = self.axes[name]
        first = np.moveaxis(values, axis, 1)
        rows = first.reshape(batch, first.shape[1] // batch, *first.shape[2:])
        return np.moveaxis(rows, 1, axis)
