"""One sequence of a pool: what is queued, what was computed, and the slots that sessions share.

push  -> pieces in a queue           by any thread
take  -> the next tokens of a piece  by the thread that advances the pool
state -> a value                     after the tokens computed so far
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from linexport.artifact.call_inputs import Arrays, Input, check_finite
from linexport.artifact.runtime import Artifact
from linexport.artifact.state import StreamState
from linexport.errors import LinexportError, NoFreeSlotError, UsageError
from linexport.graph.states import LENGTH
from linexport.serving.prompts import History, Prompts
from linexport.serving.store import Place, Store


@dataclass
class Piece:
    """Inputs of a piece in a queue; calls have taken its tokens before ``start``.

    A call ends at each of ``marks``, so that the state after that token exists. Each gives the
    logits of its last ``logits_to_keep`` tokens, 0 of all.
    """

    feeds: Arrays
    length: int
    logits_to_keep: int = 0
    start: int = 0
    marks: frozenset[int] = frozenset()

    def following(self, chunk: int) -> int:
        """Return the number of tokens for the next call, ``chunk`` at most."""
        ends = [mark for mark in self.marks if mark > self.start]
        return min(min(ends, default=self.length) - self.start, self.length - self.start, chunk)


@dataclass(eq=False)
class SessionProgress:
    """How far a session is.

    Attributes:
        place: of its state.
        history: token ids before; None where they are not known.
        pieces: queued.
        computed: number of tokens of this sequence that calls have computed.
        cached: tokens of the prompt whose state came from the cache.
        version: raised by what makes a result that is being computed void.
        error: that ended the sequence.
        open: False once the session has left its pool.
    """

    place: Place
    history: History | None
    pieces: deque[Piece] = field(default_factory=deque)
    computed: int = 0
    cached: int = 0
    version: int = 0
    error: LinexportError | None = None
    open: bool = True

    def check(self) -> None:
        """Refuse what needs a state.

        Raises:
            UsageError: the session is closed, or has lost its state.
        """
        if not self.open:
            raise UsageError("The session is closed.")
        if self.error is not None:
            raise UsageError(f"The session has ended: {self.error}")


class Slots:
    """The open sessions of a pool, and what they share.

    Attributes:
        changed: guards all of it; notified when something is queued or the pool is closed.
        turns: sessions in the order in which their prompts are served.
    """

    def __init__(self, model: Artifact, count: int, store: Store, prompts: Prompts | None) -> None:
        self.model, self.count, self.store, self.prompts = model, count, store, prompts
        self.sessions: list[Session] = []
        self.turns: deque[Session] = deque()
        self.changed = threading.Condition()
        self.closed = False

    def open(self, state: StreamState | None) -> Session:
        """Return a new session; see ``Pool.open``."""
        if state is not None:
            self.model.check_state(state, "The state")
            rows = next((len(v) for n, v in state.arrays.items() if n != LENGTH[0]), 1)
            if rows != 1:
                raise UsageError(f"The state has {rows} rows; a session has one.")
        with self.changed:
            if self.closed:
                raise UsageError("The pool is closed.")
            if len(self.sessions) == self.count:
                raise NoFreeSlotError(
                    f"All {self.count} slots are taken. Close a session, or open a pool with more."
                )
            session = Session(self, state)
            self.sessions.append(session)
        return session

    def leave(self, session: Session) -> None:
        """Free the slot of an open session; what is queued is dropped."""
        progress = session.progress
        progress.pieces.clear()
        progress.version += 1
        progress.open = False
        self.store.drop(progress.place)
        self.sessions.remove(session)
        if session in self.turns:
            self.turns.remove(session)

    def close(self) -> None:
        """Close every session, and end what waits for the pool."""
        with self.changed:
            self.closed = True
            for session in list(self.sessions):
                self.leave(session)
            self.changed.notify_all()


class Session:
    """A sequence of a pool: ``push`` queues what comes next, ``Pool.advance`` computes it."""

    def __init__(self, slots: Slots, state: StreamState | None) -> None:
        self._slots = slots
        place = slots.store.place(dict(state.arrays) if state else {})
        self.progress = SessionProgress(place, None if state and state.arrays else History())

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """True once the session has left its pool."""
        return not self.progress.open

    @property
    def cached(self) -> int:
        """Tokens of the prompt whose state came from the cache."""
        return self.progress.cached

    @property
    def queued(self) -> int:
        """Number of tokens that no call has taken yet."""
        with self._slots.changed:
            return sum(p.length - p.start for p in self.progress.pieces)

    def push(self, *args: Input, logits_to_keep: int = 0, **inputs: np.ndarray) -> None:
        """Queue the next piece of the sequence, of one row and one token or many.

        Arguments are those of ``Stream.step``; ``logits_to_keep`` is of each call that computes
        part of the piece. Arrays are copied.

        Raises:
            UsageError: see ``Artifact.run``; there is more than one row; or the session is closed
                or has lost its state. Nothing was queued.
            NonFiniteError: NaN or infinity in an input. Nothing was queued.
        """
        slots = self._slots
        slots.model.check_kept(logits_to_keep)
        feeds, rows = slots.model.inputs.bind(args, inputs)
        if rows != 1:
            raise UsageError(f"The piece has {rows} rows; a session has one.")
        check_finite(feeds, frozenset())
        copied = {name: values.copy() for name, values in feeds.items()}
        piece = Piece(copied, slots.model.token_axis.length(copied), logits_to_keep)
        with slots.changed:
            self.progress.check()
            self._find_prefix(piece)
            self.progress.pieces.append(piece)
            if self not in slots.turns:
                slots.turns.append(self)
            slots.changed.notify_all()

    def state(self) -> StreamState:
        """Return the state after the tokens computed so far, as a value.

        Raises:
            UsageError: the session is closed, or has lost its state.
        """
        with self._slots.changed:
            self.progress.check()
            arrays = self._slots.store.read(self.progress.place)
            return StreamState(self._slots.model.model_sha256, arrays)

    def remember(self) -> None:
        """Keep the state after the tokens computed so far in the cache of the pool.

        The pool does that for prompts. Nothing is kept without a cache, or where the
        tokens before are not known, as in a session that was opened with a state.
        """
        with self._slots.changed:
            prompts, progress = self._slots.prompts, self.progress
            if prompts is not None and progress.history is not None and progress.computed:
                prompts.cache.put(progress.history.ids[: progress.computed], self.state())

    def fork(self) -> Session:
        """Return another session that goes on from the tokens computed so far.

        Nothing is queued in it.

        Raises:
            NoFreeSlotError: all slots are taken.
            UsageError: see ``state``.
        """
        return self._slots.open(self.state())

    def reset(self) -> None:
        """Begin a new sequence; what is queued is dropped.

        Raises:
            UsageError: the session is closed.
        """
        store = self._slots.store
        with self._slots.changed:
            self.progress.error = None
            self.progress.check()
            store.drop(self.progress.place)
            version = self.progress.version + 1
            self.progress = SessionProgress(store.place({}), History(), version=version)

    def close(self) -> None:
        """Free the slot; what is queued is dropped. Closing twice does nothing."""
        with self._slots.changed:
            if self.progress.open:
                self._slots.leave(self)

    def _find_prefix(self, piece: Piece) -> None:
        """Note the tokens of a piece, and begin a first one after its longest known prefix."""
        prompts, progress = self._slots.prompts, self.progress
        if prompts is None or progress.history is None:
            return
        ids = prompts.ids(piece.feeds)
        if ids is None:
            progress.history = None
            return
        start = len(progress.history.ids)
        progress.history.add(ids)
        if not start:
            length, state = prompts.longest(ids)
            if state is not None:
                progress.place = self._slots.store.place(dict(state.arrays))
                piece.start = progress.cached = progress.computed = length
        piece.marks = prompts.marks(start, len(ids))
