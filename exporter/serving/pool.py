"""Continuous batching: one call of the model advances every session that has something queued.

    advance:  one token of each session that has just one to come    one call for all of them
              a chunk of the prompt whose turn it is                 one call, or the same one
                                                                     where batches are packed

Sessions join and leave between calls. Prompts take turns, a chunk each, so that neither the
sessions that decode nor a short prompt wait for a long one. A state belongs to its session alone:
a row of a call depends on no other row.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from linexport.artifact.call_inputs import Arrays
from linexport.artifact.nan_rows import lost_rows
from linexport.artifact.runtime import Artifact
from linexport.artifact.state import StreamState
from linexport.errors import (
    EnvironmentProblemError,
    LinexportError,
    NonFiniteError,
    UsageError,
)
from linexport.manifest.records import BUFFER, FIRST_CALL
from linexport.serving.call_time import in_time
from linexport.serving.chunk import measured_chunk
from linexport.serving.layout import Layout
from linexport.serving.prefix_cache import PrefixCache
from linexport.serving.prompts import Prompts
from linexport.serving.session import Session, Slots
from linexport.serving.store import Place, Stack, Store

log = logging.getLogger(__name__)

Outcome = Arrays | LinexportError
"""Outputs by name, or the error that ended the sequence of a session."""


class Pool:
    """Up to ``slots`` sessions on one artifact.

    One thread calls ``advance``; any thread may open, feed, read and close sessions meanwhile.

    Args:
        model: an artifact that streams.
        slots: number of sessions that may be open at a time.
        chunk: tokens of a prompt that one call takes; fewer delay the other sessions less. None for
            64, and on a GPU for as many as take no longer, which is measured.
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
        chunk: int | None = None,
        cache: PrefixCache | None = None,
    ) -> None:
        if not model.states:
            raise UsageError(f"{model.path} does not stream: {model.manifest.why_stateless}")
        kept = [s for s in model.states.values() if s.op == FIRST_CALL and s.shared]
        if kept:
            raise UsageError(
                f"{kept[0].past} of {model.path} is one number for all rows of a batch, and a pool "
                "computes several sequences in one call. Let the model take one for each row, or "
                "use streams: linexport.load(...).stream()."
            )
        written = next((s for s in model.states.values() if s.op == BUFFER), None)
        if written is not None:
            raise UsageError(
                f"The state {written.past} of {model.path} is a buffer that each call writes, and "
                "a pool cuts what it is given into calls of its own: outputs may depend on that. "
                "Use streams: linexport.load(...).stream()."
            )
        for name, value in (("slots", slots), ("chunk", chunk)):
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}; expected 1 or more.")
        self.model, self.slots = model, slots
        prompts = None if cache is None else Prompts(model, cache)
        self._layout = Layout(model)
        self._store = Store(model, self._layout, slots)
        size = measured_chunk(model) if chunk is None else chunk
        self._chunk = min(size, self._layout.longest or size)
        self._slots = Slots(model, slots, self._store, prompts)
        self._advancing = threading.Lock()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Session]:
        """Iterate over the open sessions, oldest first."""
        return iter(list(self._slots.sessions))

    def __len__(self) -> int:
        """Return the number of open sessions."""
        return len(self._slots.sessions)

    def open(self, state: StreamState | None = None) -> Session:
        """Return a session that begins a sequence, or goes on from a state.

        Raises:
            NoFreeSlotError: all slots are taken.
            UsageError: the pool is closed, or the state is of another model, has NaN or infinity,
                or has more than one row.
        """
        return self._slots.open(state)

    def close(self) -> None:
        """Close every session, and end what waits for the pool."""
        self._slots.close()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until a session has something queued, and return whether one has.

        Returns False when ``timeout`` seconds have passed or the pool is closed.
        """
        slots = self._slots
        with slots.changed:
            slots.changed.wait_for(lambda: slots.closed or self._queued(), timeout)
            return not slots.closed and self._queued()

    def advance(self) -> dict[Session, Outcome]:
        """Advance every session that has one token queued, and the prompts whose turn it is.

        Returns:
            Outputs of the tokens taken, by session: of a prompt, of one chunk, which is the last
            when ``session.queued`` is 0. An error, where a session's state became NaN or infinite
            or the model refused its input: that session alone has lost its state, goes on only
            after ``reset()``, and the others were advanced.
        """
        with self._advancing:
            with self._slots.changed:
                groups = self._groups()
            found: dict[Session, Outcome] = {}
            for group in groups:
                found |= self._run(group)
        return found

    def _queued(self) -> bool:
        return any(s.progress.pieces for s in self._slots.sessions)

    def _groups(self) -> list[list[_Part]]:
        """Take what this call of ``advance`` computes from the queues, by call of the model."""
        turns = self._slots.turns
        queued = [s for s in self._slots.sessions if s.progress.pieces]
        following = {s: s.progress.pieces[0].following(self._chunk) for s in queued}
        single = [s for s, length in following.items() if length == 1]
        waiting = [s for s in turns if following.get(s, 1) > 1]
        chosen = self._chosen(waiting, following)
        for session in chosen:
            turns.remove(session)
            turns.append(session)
        return self._joined([self._take(s, following[s]) for s in (*single, *chosen)])

    def _chosen(self, waiting: list[Session], following: Mapping[Session, int]) -> list[Session]:
        """Return the prompts whose turn it is: as many as make a chunk, one at least."""
        alike = waiting
        if self._layout.packed is None:
            alike = [s for s in waiting if following[s] == following[waiting[0]]]
        ends = [*accumulate(following[s] for s in alike)]
        return alike[: max(1, bisect_right(ends, self._chunk))]

    def _take(self, session: Session, tokens: int) -> _Part:
        progress = session.progress
        piece = progress.pieces[0]
        feeds = self.model.token_axis.cut(piece.feeds, piece.start, piece.start + tokens)
        piece.start += tokens
        if piece.start == piece.length:
            progress.pieces.popleft()
        marked = piece.start in piece.marks
        place, kept = progress.place, piece.logits_to_keep
        return _Part(session, progress.version, feeds, place, tokens, marked, kept)

    def _joined(self, parts: Iterable[_Part]) -> list[list[_Part]]:
        """Split parts into those that may share a call."""
        found = defaultdict(list)
        for part in parts:
            found[self._layout.joins(self._store.lengths(part.place), part.tokens)].append(part)
        most = self._layout.most
        return [g[at : at + most] for g in found.values() for at in range(0, len(g), most)]

    def _run(self, parts: list[_Part]) -> dict[Session, Outcome]:
        """Advance sessions by one call; where the call fails, one by one."""
        with self._slots.changed:
            parts = [p for p in parts if p.is_current]
            if not parts:
                return {}
            stack = self._store.gather([p.place for p in parts])
        by_place = {id(p.place): p for p in parts}
        group = [by_place[id(place)] for place in stack.places]
        feeds = self._layout.stack_inputs([p.feeds for p in group])
        kept = [p.logits_to_keep for p in group]
        # Side by side, the last tokens of a call are those of one session alone.
        most = 0 if 0 in kept or self._layout.packed is not None else max(kept)
        try:
            with in_time():
                outputs, after = self.model.call(feeds, stack.past, stack.into, logits_to_keep=most)
        except Exception as error:
            if len(group) > 1:
                log.debug("a call of %d sessions failed; they are advanced alone", len(group))
                return {s: o for part in group for s, o in self._run([part]).items()}
            return self._keep(group, [_refused(error)], stack, {})
        lost = self._lost(after, group[0].tokens, outputs)
        tokens = [part.tokens for part in group]
        own = self._layout.outputs(outputs, tokens)
        results: list[Outcome] = [self.model.kept(o, n) for o, n in zip(own, kept, strict=True)]
        for row, names in lost.items():
            results[row] = _ended(names)
        rest = {name: values for name, values in after.items() if name not in stack.into}
        return self._keep(group, results, stack, rest)

    def _keep(
        self, group: Sequence[_Part], outcomes: Sequence[Outcome], stack: Stack, rest: Arrays
    ) -> dict[Session, Outcome]:
        """Give sessions their new states; of those that left meanwhile nothing is kept."""
        found: dict[Session, Outcome] = {}
        with self._slots.changed:
            kept = []
            for part, outcome in zip(group, outcomes, strict=True):
                session, there = part.session, part.is_current
                kept.append(there and not isinstance(outcome, LinexportError))
                if there:
                    found[session] = outcome
                if there and isinstance(outcome, LinexportError):
                    session.progress.error = outcome
                    session.progress.pieces.clear()
                    self._store.drop(session.progress.place)
            self._store.commit(stack, rest, group[0].tokens, kept)
            for part in (p for p, keep in zip(group, kept, strict=True) if keep):
                part.session.progress.computed += part.tokens
                if part.last_of_mark:
                    part.session.remember()
        return found

    def _lost(self, after: Arrays, tokens: int, outputs: Arrays) -> dict[int, list[str]]:
        """Name the states with NaN or infinity of each row that has any."""
        axes = {name: s.growing_axis for name, s in self.model.states.items()}
        held = {n: after[n].shape[axis] - tokens for n, axis in axes.items() if axis is not None}
        found = defaultdict(list)
        count = self.model.rows_of(after) or 1
        for name, rows in lost_rows(self.model.states, after, held, outputs, count).items():
            for row in rows:
                found[row].append(name)
        return found


@dataclass(frozen=True)
class _Part:
    """A session's share of a call: its inputs, its state, and the number of tokens.

    Its state is kept in the cache afterwards where ``last_of_mark``. The logits of its last
    ``logits_to_keep`` tokens are read, 0 of all.
    """

    session: Session
    version: int
    feeds: Arrays
    place: Place
    tokens: int
    last_of_mark: bool
    logits_to_keep: int

    @property
    def is_current(self) -> bool:
        """True while the session has neither left nor begun anew."""
        return self.session.progress.version == self.version


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
