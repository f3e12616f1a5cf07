"""A sequence in progress: the state of each row is kept from step to step.

    outputs, state = model(inputs, state)

A row whose state becomes NaN or infinite is stopped: its state begins anew, its outputs are NaN
until ``reset(rows=...)``, and the other rows go on. A stream may be used by several threads; their
steps follow each other.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from linexport.artifact.call_inputs import Arrays, Input, check_finite, count_rows
from linexport.artifact.finite import non_finite_rows
from linexport.artifact.model import Model
from linexport.artifact.state import StreamState
from linexport.errors import NonFiniteError, UsageError
from linexport.graph.states import LENGTH


class Stream:
    """A sequence in progress: ``step`` feeds the next piece, of one token or many.

    The batch size is that of the first step.
    """

    def __init__(
        self, model: Model, *, finite: bool = True, state: StreamState | None = None
    ) -> None:
        self._model, self._finite = model, finite
        self._lock = threading.Lock()
        self._state: Arrays | None = None
        self._stopped: frozenset[int] = frozenset()
        if state is not None:
            self.restore(state)

    @property
    def stopped(self) -> frozenset[int]:
        """Rows whose state was lost to NaN or infinity."""
        return self._stopped

    def step(self, *args: Input, **inputs: np.ndarray) -> Arrays:
        """Return outputs by name for the next piece of the sequence.

        Raises:
            UsageError: see ``Artifact.run``; or the batch differs from that of the state. No row
                was advanced.
            NonFiniteError: NaN or infinity in an input: no row was advanced. Or in a state: those
                rows are stopped, the others were advanced, and the error has the ``outputs``.
        """
        model = self._model
        feeds, batch = model.inputs.bind(args, inputs)
        with self._lock:
            before = model.initial_state(batch) if self._state is None else self._state
            held = next(iter(before.values())).shape[0]
            if held != batch:
                raise UsageError(
                    f"This stream has batch {held}; the step has {batch}. Call reset()."
                )
            if self._finite:
                check_finite(feeds, self._stopped)
            outputs, after = model.call(feeds, before)
            lost = self._lost(before, after) if self._finite else {}
            newly = frozenset(row for rows in lost.values() for row in rows) - self._stopped
            stopped = self._stopped | newly
            if lost:
                after = self._begun(after, {row for rows in lost.values() for row in rows})
            if stopped:
                outputs = {n: _blank(values, stopped, batch) for n, values in outputs.items()}
            self._state, self._stopped = after, stopped
        if newly:
            names = tuple(name for name, rows in lost.items() if newly & {*rows})
            raise NonFiniteError(
                f"The state {', '.join(names)} became NaN or infinite in "
                f"{count_rows(sorted(newly))}: these are stopped until reset(rows=...), the others "
                "were advanced.",
                names,
                tuple(sorted(newly)),
                outputs,
            )
        return outputs

    def reset(self, rows: Iterable[int] | None = None) -> None:
        """Begin a new sequence, in all rows or in those given.

        Raises:
            UsageError: there is no such row, or a state of this model is one of all rows together.
        """
        with self._lock:
            if rows is None:
                self._state, self._stopped = None, frozenset()
                return
            chosen = sorted({*rows})
            held = 0 if self._state is None else next(iter(self._state.values())).shape[0]
            if self._state is None or not all(0 <= row < held for row in chosen):
                raise UsageError(f"Found {count_rows(chosen)}; this stream has {held} rows.")
            shared = self._model.shared_states()
            if shared:
                raise UsageError(
                    f"The state {shared[0]} is one of all rows together, so that one row cannot "
                    "begin anew. Call reset() for all, or use a stream for each."
                )
            self._state = self._begun(self._state, chosen)
            self._stopped -= {*chosen}

    def state(self) -> StreamState:
        """Return the state as a value; later steps do not change it.

        Raises:
            UsageError: rows are stopped, so that they have none.
        """
        with self._lock:
            if self._stopped:
                raise UsageError(
                    f"{count_rows(sorted(self._stopped)).capitalize()} of this stream lost the "
                    "state to NaN or infinity. Call reset(rows=...) first."
                )
            return StreamState(self._model.model_sha256, self._state or {})

    def restore(self, state: StreamState | str | Path) -> None:
        """Go on from a state, or from the file of one.

        Raises:
            UsageError: not a saved state, one of another model, or one with NaN or infinity.
        """
        named = "The state" if isinstance(state, StreamState) else str(state)
        value = state if isinstance(state, StreamState) else StreamState.load(state)
        self._model.check_state(value, named)
        with self._lock:
            self._state, self._stopped = dict(value.arrays) or None, frozenset()

    def fork(self) -> Stream:
        """Return a second stream that goes on from here; neither affects the other."""
        other = Stream(self._model, finite=self._finite)
        with self._lock:
            # Arrays are shared: steps and resets make new ones.
            other._state, other._stopped = self._state, self._stopped
        return other

    def save(self, path: str | Path) -> None:
        """Write the state to an ``.npz`` file; see ``state``."""
        self.state().save(path)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the artifact, which is opened again, and the state."""
        return _resume, (self._model, self._finite, self.state())

    def _lost(self, before: Arrays, after: Arrays) -> dict[str, list[int]]:
        """Find the rows with NaN or infinity of each state that has any.

        Of a state that grows only what was added is looked at: the rest was, when it was added.
        """
        found = {}
        for name, state in self._model.states.items():
            values, axis = after[name], state.growing_axis
            if axis is not None:
                values = np.moveaxis(values, axis, 0)[before[name].shape[axis] :]
                values = np.moveaxis(values, 0, axis)
            rows = non_finite_rows(values)
            if len(rows):
                found[name] = rows.tolist()
        return found

    def _begun(self, arrays: Arrays, rows: Collection[int]) -> Arrays:
        """Copy states with these rows as at the beginning; what they grew by becomes padding."""
        changed = {name: values.copy() for name, values in arrays.items()}
        for name, state in self._model.states.items():
            if name != LENGTH[0]:
                changed[name][sorted(rows)] = (
                    0 if state.growing_axis is not None else state.initial_value
                )
        return changed


def _blank(values: np.ndarray, rows: Collection[int], batch: int) -> np.ndarray:
    """Copy an output with NaN in rows that are stopped, where its type has that."""
    if values.dtype.kind != "f" or not values.ndim or values.shape[0] != batch:
        return values
    values = values.copy()
    values[sorted(rows)] = np.nan
    return values


def _resume(model: Model, finite: bool, state: StreamState) -> Stream:
    return Stream(model, finite=finite, state=state)
