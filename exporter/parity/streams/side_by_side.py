"""Sequences of several lengths in one call of a packed model, each as if it were alone.

    call 1   the first half of each        call 2   the rest of each, from its own states

A sequence of a single token is not in the second call, so that its batch is another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from linexport.graph.states import State
from linexport.targets.runtime.packed_session import PackedSession

Arrays = Mapping[str, np.ndarray]
"""By name."""


def run_side_by_side(
    session: PackedSession, states: Sequence[State], rows: Sequence[Arrays], unit: int = 1
) -> list[dict[str, np.ndarray]]:
    """Return the outputs of each sequence, states among them.

    Args:
        session: of the packed model.
        states: of it.
        rows: inputs of each sequence without states, as for a batch of one.
        unit: tokens come in multiples of it.
    """
    lengths = [session.length(row) for row in rows]
    halves = [unit * -(-length // unit // 2) for length in lengths]
    begun = {s.past: s.start(1) for s in states}
    found = session.run_sequences(
        [{**_cut(session, row, 0, half), **begun} for row, half in zip(rows, halves, strict=True)]
    )
    left = [i for i, length in enumerate(lengths) if halves[i] < length]
    held = [{s.past: found[i][s.present] for s in states} for i in left]
    given = [_cut(session, rows[i], halves[i], lengths[i]) for i in left]
    later = session.run_sequences([{**g, **h} for g, h in zip(given, held, strict=True)])
    for i, rest in zip(left, later, strict=True):
        found[i] = {n: _joined(session, n, found[i][n], x) for n, x in rest.items()}
    return found


def _cut(session: PackedSession, row: Arrays, start: int, stop: int) -> dict[str, np.ndarray]:
    return {n: np.take(x, range(start, stop), session.axes[n]) for n, x in row.items()}


def _joined(session: PackedSession, name: str, first: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """Return an output of both calls; a state is that of the second."""
    return np.concatenate([first, rest], session.axes[name]) if name in session.axes else rest
