"""Continuous batching: one call of the model advances every session that has something queued.

    advance:  one token of each session that has just one to come    one call for all of them
              a chunk of the prompt whose turn it is                 one call

Sessions join and leave between calls. Prompts take turns, a chunk each, so that neither the
sessions that decode nor a short prompt wait for a long one. A state belongs to its session alone:
a row of a call depends on no other row.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from linexport.artifact.call_inputs import Arrays, Input, check_finite
from linexport.artifact.finite import non_finite_rows
from linexport.artifact.runtime import Artifact
from linexport.artifact.state import StreamState
from linexport.errors import (
    EnvironmentProblemError,
    LinexportError,
    NoFreeSlotError,
    NonFiniteError,
    UsageError,
)
from linexport.graph.states import LENGTH
from linexport.serving.layout import Layout
from linexport.serving.prefix_cache import PrefixCache
from linexport.serving.prompts import History, Prompts
from linexport.serving.store import Place, Stack, Store

log = logging.getLogger(__name__)

Outcome = Arrays | LinexportError
"""Outputs by name, or the error that ended the sequence of a session."""

CHUNK = 64
"""Tokens of a prompt in one call."""


class Pool:
    """Up to ``slots`` sessions on one artifact.

    One thread calls ``advance``; any thread may open, feed, read and close sessions meanwhile.

    Args:
        model: an artifact that streams.
        slots: number of sessions that may be open at a time.
        chunk: tokens of a prompt that one call takes; fewer delay the other sessions less.
        cache: states after prefixes of prompts, to go on from and to add to.

    Raises:
        UsageError: the model does not stream, its batch is fixed, a number is below 1, or there is
            a cache and the model is not a language model.
    """

    def __init__(
        self,
        model: Artifact,
        *,
        slots: int = 16,
        chunk: int = CHUNK,
        cache: PrefixCache | None = None,
    ) -> None:
        if not model.states:
            raise UsageError(f"{model.path} does not stream: {model.manifest.why_stateless}")
        for name, value in (("slots", slots), ("chunk", chunk)):
            if value < 1:
                raise UsageError(f"{name} is {value}; expected 1 or more.")
        self.model, self.slots = model, slots
        self._prompts = None if cache is None else Prompts(model, cache)
        self._layout = Layout(model)
        self._store = Store(model, self._layout, slots)
        self._chunk = min(chunk, self._layout.longest or chunk)
        self._sessions: list[Session] = []
        self._turns: deque[Session] = deque()
        self._changed = threading.Condition()
        self._advancing = threading.Lock()
        self._closed = False

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Session]:
        """Iterate over the open sessions, oldest first."""
        return iter(list(self._sessions))

    def __len__(self) -> int:
        """Return the number of open sessions."""
        return len(self._sessions)

    def open(self, state: StreamState | None = None) -> Session:
        """Return a session that begins a sequence, or goes on from a state.

        Raises:
            NoFreeSlotError: all slots are taken.
            UsageError: the pool is closed, or the state is of another model, has NaN or infinity,
                or has more than one row.
        """
        if state is not None:
            self.model.check_state(state, "The state")
            rows = next((len(v) for n, v in state.arrays.items() if n != LENGTH[0]), 1)
            if rows != 1:
                raise UsageError(f"The state has {rows} rows; a session has one.")
        with self._changed:
            if self._closed:
                raise UsageError("The pool is closed.")
            if len(self._sessions) == self.slots:
                raise NoFreeSlotError(
                    f"All {self.slots} slots are taken. Close a session, or open a pool with more."
                )
            session = Session(self, state)
            self._sessions.append(session)
        return session

    def close(self) -> None:
        """Close every session, and end what waits for the pool."""
        with self._changed:
            self._closed = True
            for session in list(self._sessions):
                self._leave(session)
            self._changed.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until a session has something queued, and return whether one has.

        Returns False when ``timeout`` seconds have passed or the pool is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._queued(), timeout)
            return not self._closed and self._queued()

    def advance(self) -> dict[Session, Outcome]:
        """Advance every session that has one token queued, and the prompts whose turn it is.

        Returns:
            Outputs of the tokens taken, by session: of a prompt, of one chunk, which is the last
            when ``session.queued`` is 0. An error, where a session's state became NaN or infinite
            or the model refused its input: that session alone has lost its state, goes on only
            after ``reset()``, and the others were advanced.
        """
        with self._advancing:
            with self._changed:
                groups = self._groups()
            found: dict[Session, Outcome] = {}
            for group in groups:
                found |= self._run(group)
        return found

    def _queued(self) -> bool:
        return any(s._pieces for s in self._sessions)

    def _groups(self) -> list[list[_Part]]:
        """Take what this call of ``advance`` computes from the queues, by call of the model."""
        following = {s: s._pieces[0].following(self._chunk) for s in self._sessions if s._pieces}
        single = [s for s, length in following.items() if length == 1]
        groups = self._joined([self._take(s, 1) for s in single])
        waiting = [s for s in self._turns if following.get(s, 1) > 1]
        if waiting:
            length = following[waiting[0]]
            alike = [s for s in waiting if following[s] == length]
            chosen = alike[: max(1, self._chunk // length)]
            groups += self._joined([self._take(s, length) for s in chosen])
            for session in chosen:
                self._turns.remove(session)
                self._turns.append(session)
        return groups

    def _take(self, session: Session, tokens: int) -> _Part:
        piece = session._pieces[0]
        feeds = self.model.token_axis.cut(piece.feeds, piece.start, piece.start + tokens)
        piece.start += tokens
        if piece.start == piece.length:
            session._pieces.popleft()
        marked = piece.start in piece.marks
        return _Part(session, session._version, feeds, session._place, tokens, marked)

    def _joined(self, parts: Iterable[_Part]) -> list[list[_Part]]:
        """Split parts of one length into those that may share a call."""
        found = defaultdict(list)
        for part in parts:
            found[self._layout.joins(self._store.lengths(part.place))].append(part)
        most = self._layout.most
        return [g[at : at + most] for g in found.values() for at in range(0, len(g), most)]

    def _run(self, parts: list[_Part]) -> dict[Session, Outcome]:
        """Advance sessions by one call; where the call fails, one by one."""
        with self._changed:
            parts = [p for p in parts if p.version == p.session._version]
            if not parts:
                return {}
            stack = self._store.gather([p.place for p in parts])
        by_place = {id(p.place): p for p in parts}
        group = [by_place[id(place)] for place in stack.places]
        feeds = self._layout.stack_inputs([p.feeds for p in group])
        try:
            outputs, after = self.model.call(feeds, stack.past, stack.into)
        except Exception as error:
            if len(group) > 1:
                log.debug("a call of %d sessions failed; they are advanced alone", len(group))
                return {s: o for part in group for s, o in self._run([part]).items()}
            return self._keep(group, [_refused(error)], stack, {})
        lost = self._lost(after, group[0].tokens)
        results: list[Outcome] = list(self._layout.outputs(outputs, len(group)))
        for row, names in lost.items():
            results[row] = _ended(names)
        rest = {name: values for name, values in after.items() if name not in stack.into}
        return self._keep(group, results, stack, rest)

    def _keep(
        self, group: Sequence[_Part], outcomes: Sequence[Outcome], stack: Stack, rest: Arrays
    ) -> dict[Session, Outcome]:
        """Give sessions their new states; of those that left meanwhile nothing is kept."""
        found: dict[Session, Outcome] = {}
        with self._changed:
            kept = []
            for part, outcome in zip(group, outcomes, strict=True):
                session = part.session
                there = session._version == part.version
                kept.append(there and not isinstance(outcome, LinexportError))
                if there:
                    found[session] = outcome
                if there and isinstance(outcome, LinexportError):
                    session._error = outcome
                    session._pieces.clear()
                    self._store.drop(session._place)
            self._store.commit(stack, rest, group[0].tokens, kept)
            for part in (p for p, keep in zip(group, kept, strict=True) if keep):
                part.session._computed += part.tokens
                if part.last_of_mark:
                    part.session.remember()
        return found

    def _lost(self, after: Arrays, tokens: int) -> dict[int, list[str]]:
        """Find NaN and infinity in states, by row; of one that grows, in what was added."""
        found = defaultdict(list)
        for name, state in self.model.states.items():
            axis, values = state.growing_axis, after[name]
            if axis is not None:
                values = values[(slice(None),) * axis + (slice(-tokens, None),)]
            for row in non_finite_rows(values):
                found[int(row)].append(name)
        return found

    def _leave(self, session: Session) -> None:
        session._pieces.clear()
        session._version += 1
        session._open = False
        self._store.drop(session._place)
        self._sessions.remove(session)
        if session in self._turns:
            self._turns.remove(session)


class Session:
    """A sequence of a pool: ``push`` queues what comes next, ``Pool.advance`` computes it."""

    def __init__(self, pool: Pool, state: StreamState | None) -> None:
        self.pool = pool
        self._place = pool._store.place(dict(state.arrays) if state else {})
        self._pieces: deque[_Piece] = deque()
        self._error: LinexportError | None = None
        self._open = True
        self._version = 0
        """Raised by what makes a result that is being computed void."""
        self._history = None if state and state.arrays else History()
        self._computed = 0
        self.cached = 0
        """Tokens of the prompt whose state came from the cache."""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """True once the session has left its pool."""
        return not self._open

    @property
    def queued(self) -> int:
        """Number of tokens that no call has taken yet."""
        with self.pool._changed:
            return sum(p.length - p.start for p in self._pieces)

    def push(self, *args: Input, **inputs: np.ndarray) -> None:
        """Queue the next piece of the sequence, of one row and one token or many.

        Arguments are those of ``Stream.step``. Arrays are copied.

        Raises:
            UsageError: see ``Artifact.run``; there is more than one row; or the session is closed
                or has lost its state. Nothing was queued.
            NonFiniteError: NaN or infinity in an input. Nothing was queued.
        """
        feeds, rows = self.pool.model.inputs.bind(args, inputs)
        if rows != 1:
            raise UsageError(f"The piece has {rows} rows; a session has one.")
        check_finite(feeds, frozenset())
        copied = {name: values.copy() for name, values in feeds.items()}
        piece = _Piece(copied, self.pool.model.token_axis.length(copied))
        with self.pool._changed:
            self._check()
            self._find_prefix(piece)
            self._pieces.append(piece)
            if self not in self.pool._turns:
                self.pool._turns.append(self)
            self.pool._changed.notify_all()

    def state(self) -> StreamState:
        """Return the state after the tokens computed so far, as a value.

        Raises:
            UsageError: the session is closed, or has lost its state.
        """
        with self.pool._changed:
            self._check()
            arrays = self.pool._store.read(self._place)
            return StreamState(self.pool.model.model_sha256, arrays)

    def remember(self) -> None:
        """Keep the state after the tokens computed so far in the cache of the pool.

        The pool does that for prompts. Nothing is kept where there is no cache, or where the
        tokens before are not known, as in a session that was opened with a state.
        """
        with self.pool._changed:
            prompts, history = self.pool._prompts, self._history
            if prompts is not None and history is not None and self._computed:
                prompts.cache.put(history.ids[: self._computed], self.state())

    def fork(self) -> Session:
        """Return another session that goes on from the tokens computed so far.

        Nothing is queued in it.

        Raises:
            NoFreeSlotError: all slots are taken.
            UsageError: see ``state``.
        """
        return self.pool.open(self.state())

    def reset(self) -> None:
        """Begin a new sequence; what is queued is dropped.

        Raises:
            UsageError: the session is closed.
        """
        with self.pool._changed:
            self._error = None
            self._check()
            self._pieces.clear()
            self._version += 1
            self.pool._store.drop(self._place)
            self._place = self.pool._store.place({})
            self._history, self._computed, self.cached = History(), 0, 0

    def close(self) -> None:
        """Free the slot; what is queued is dropped. Closing twice does nothing."""
        with self.pool._changed:
            if self._open:
                self.pool._leave(self)

    def _find_prefix(self, piece: _Piece) -> None:
        """Note the tokens of a piece, and begin a first one after its longest known prefix."""
        prompts = self.pool._prompts
        if prompts is None or self._history is None:
            return
        ids = prompts.ids(piece.feeds)
        if ids is None:
            self._history = None
            return
        first = not len(self._history.ids)
        start = len(self._history.ids)
        self._history.add(ids)
        if first:
            length, state = prompts.longest(ids)
            if state is not None:
                self._place = self.pool._store.place(dict(state.arrays))
                piece.start = self.cached = self._computed = length
        piece.marks = prompts.marks(start, len(ids))

    def _check(self) -> None:
        if not self._open:
            raise UsageError("The session is closed.")
        if self._error is not None:
            raise UsageError(f"The session has ended: {self._error}")


@dataclass
class _Piece:
    """Inputs of a piece in a queue; calls have taken its tokens before ``start``.

    A call ends at each of ``marks``, so that the state after that token exists.
    """

    feeds: Arrays
    length: int
    start: int = 0
    marks: frozenset[int] = frozenset()

    def following(self, chunk: int) -> int:
        """Return the number of tokens for the next call, ``chunk`` at most."""
        ends = [mark for mark in self.marks if mark > self.start]
        return min(min(ends, default=self.length) - self.start, self.length - self.start, chunk)


@dataclass(frozen=True)
class _Part:
    """A session's share of a call: its inputs, its state, and the number of tokens.

    Its state is kept in the cache afterwards where ``last_of_mark``.
    """

    session: Session
    version: int
    feeds: Arrays
    place: Place
    tokens: int
    last_of_mark: bool


def _ended(names: Sequence[str]) -> NonFiniteError:
    return NonFiniteError(
        f"The state {', '.join(names)} of this session became NaN or infinite. Call reset() to "
        "begin anew.",
        tuple(names),
        (0,),
    )


def _refused(error: Exception) -> LinexportError:
    if isinstance(error, LinexportError):
        return error
    text: Any = str(error).splitlines() or [type(error).__name__]
    return EnvironmentProblemError(
        f"The runtime could not compute this session: {text[0]} Call reset() to begin anew."
    )
