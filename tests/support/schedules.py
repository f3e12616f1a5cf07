"""Random schedules of a pool, replayed with a stream for each session.

open | push(session, length) | advance | fork(session) | close(session)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from linexport.artifact import Artifact, Stream
from linexport.serving import Session

SLOTS, CHUNK = 4, 8
TOLERANCE = 1e-5
"""Relative to the largest value: float32 sums in another order."""

Draw = Callable[[int, int], np.ndarray]
"""Input of so many tokens, from a seed."""

STEPS = st.one_of(
    st.just(("open", 0, 0)),
    st.tuples(st.just("push"), st.integers(0, 9), st.sampled_from([1, 1, 1, 2, 8, 9, 21])),
    st.just(("advance", 0, 0)),
    st.tuples(st.just("fork"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("close"), st.integers(0, 9), st.just(0)),
)


@dataclass
class _Alone:
    """A session's twin: its stream, what was pushed, and what the stream gave for it."""

    stream: Stream
    pending: np.ndarray | None = None

    def take(self, tokens: int) -> dict[str, np.ndarray]:
        assert self.pending is not None
        piece, self.pending = self.pending[:, :tokens], self.pending[:, tokens:]
        return self.stream.step(piece)


@dataclass(frozen=True)
class Schedule:
    """Steps in order; the numbers choose among the sessions that are open."""

    steps: tuple[tuple[str, int, int], ...]

    def check(self, model: Artifact, draw: Draw) -> None:
        """Play the schedule, then advance until nothing is queued, comparing every output."""
        twins: dict[Session, _Alone] = {}
        with model.pool(slots=SLOTS, chunk=CHUNK) as pool:
            for number, (kind, choice, length) in enumerate(self.steps):
                sessions = list(twins)
                if kind == "open" and len(sessions) < SLOTS:
                    twins[pool.open()] = _Alone(model.stream())
                elif kind == "advance":
                    _compare(pool.advance(), twins)
                elif sessions:
                    session = sessions[choice % len(sessions)]
                    twin = twins[session]
                    if kind == "push":
                        piece = draw(length, number)
                        session.push(piece)
                        before = [] if twin.pending is None else [twin.pending]
                        twin.pending = np.concatenate([*before, piece], 1)
                    elif kind == "fork" and len(sessions) < SLOTS:
                        twins[session.fork()] = _Alone(twin.stream.fork())
                    elif kind == "close":
                        session.close()
                        del twins[session]
            while any(s.queued for s in twins):
                _compare(pool.advance(), twins)
            for session, twin in twins.items():
                assert twin.pending is None or not twin.pending.shape[1]
                there, alone = session.state().arrays, twin.stream.state().arrays
                assert there.keys() == alone.keys()
                for name, value in there.items():
                    _close(value, alone[name])


def _compare(found: dict[Session, Any], twins: dict[Session, _Alone]) -> None:
    for session, outcome in found.items():
        assert isinstance(outcome, dict), outcome
        (values,) = outcome.values()
        (expected,) = twins[session].take(values.shape[1]).values()
        _close(values, expected)


def _close(found: np.ndarray, expected: np.ndarray) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    scale = np.abs(expected).max(initial=1e-3)
    assert np.abs(found - expected).max(initial=0) <= TOLERANCE * scale


def schedules(most: int = 25) -> st.SearchStrategy[Schedule]:
    """Schedules of up to so many steps, which begin by opening two sessions."""
    begin = (("open", 0, 0),) * 2
    return st.lists(STEPS, max_size=most).map(lambda steps: Schedule((*begin, *steps)))
