"""A sequence in progress: the state of each row is kept from step to step.

    outputs, state = model(inputs, state)

A row whose state becomes NaN or infinite is stopped: its state begins anew, its outputs are NaN
until ``reset(rows=...)``, and the other rows go on. A stream may be used by several threads; their
steps follow each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linexport.artifact.call_inputs import Arrays, Input, check_finite, count_rows
from linexport.artifact.model import Model
from linexport.artifact.nan_rows import begun_again, blanked, lost_rows
from linexport.artifact.state import StreamState
from linexport.artifact.state_history import PastSteps
from linexport.artifact.text.language_interface import language_interface
from linexport.errors import NonFiniteError, UsageError
from linexport.manifest.records import BUFFER
from linexport.targets.runtime.appended_caches import own_memory

MOST_PENDING = 16
"""Tokens that may wait for the next step to be computed again; more would make it longer."""


@dataclass(frozen=True)
class Verified:
    """Result of ``Stream.verify``.

    Attributes:
        tokens: the proposals that are right, and the token after them.
        logits: that each of these was chosen from, (len(tokens), vocabulary).
        hidden: states of the tokens fed that are kept, (kept, width); None where the model does not
            give them.
    """

    tokens: tuple[int, ...]
    logits: np.ndarray
    hidden: np.ndarray | None = None


def argmax(logits: np.ndarray) -> int:
    """Return the token of the largest logit; of equals, the first."""
    return int(logits.argmax())


class Stream:
    """A sequence in progress: ``step`` feeds the next piece, of one token or many.

    The batch size is that of the first step.
    """

    def __init__(
        self,
        model: Model,
        *,
        finite: bool = True,
        state: StreamState | None = None,
        history: int = 0,
    ) -> None:
        self._model, self._finite, self._history = model, finite, history
        self._past = PastSteps(model)
        self._pending: Arrays | None = None
        """Inputs of tokens that belong to the sequence and are not in the state yet."""
        self._lock = threading.Lock()
        self._state: Arrays | None = None
        self._stopped: frozenset[int] = frozenset()
        if history and any(s.op == BUFFER for s in model.states.values()):
            raise UsageError(
                "The states of this model are buffers, which each call writes as a whole: no call "
                "can be gone back into. Leave out history, and keep states with state()."
            )
        if state is not None:
            self.restore(state)

    def __repr__(self) -> str:
        begun = "not begun" if self._state is None else "in progress"
        return f"<Stream: {begun}; states {', '.join(self._model.states) or 'none'}>"

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        """Drop the state: the stream begins a new sequence where it is used again."""
        self.reset()

    @property
    def stopped(self) -> frozenset[int]:
        """Rows whose state was lost to NaN or infinity."""
        return self._stopped

    def step(self, *args: Input, logits_to_keep: int = 0, **inputs: np.ndarray) -> Arrays:
        """Return outputs by name for the next piece of the sequence.

        Args:
            args: see ``Artifact.run``.
            logits_to_keep: of a language model: return the logits of so many last tokens, which
                saves the time of the others; 0 returns those of all.
            inputs: see ``Artifact.run``.

        Raises:
            UsageError: see ``Artifact.run``; or the batch differs from that of the state. No row
                was advanced.
            NonFiniteError: NaN or infinity in an input: no row was advanced. Or in a state: those
                rows are stopped, the others were advanced, and the error has the ``outputs``.
        """
        feeds, batch = self._model.inputs.bind(args, inputs)
        self._model.check_kept(logits_to_keep)
        with self._lock:
            outputs = self._advance(feeds, batch, self._history, logits_to_keep)
        return self._model.kept(outputs, logits_to_keep)

    def _advance(self, feeds: Arrays, batch: int, history: int, logits_to_keep: int = 0) -> Arrays:
        """Make a step of the tokens that are pending and these; return the outputs of these."""
        model = self._model
        before = model.hold(model.initial_state(batch) if self._state is None else self._state)
        held = model.rows_of(before)
        if held not in (None, batch):
            raise UsageError(f"This stream has batch {held}; the step has {batch}. Call reset().")
        if self._finite:
            check_finite(feeds, self._stopped)
        new = None
        if self._pending is not None:
            new = model.token_axis.length(feeds)
            feeds = model.token_axis.join([self._pending, feeds])
        outputs, after = model.call(feeds, before, logits_to_keep=logits_to_keep)
        if new is not None:
            outputs = model.token_axis.cut(outputs, -new)
        lost = self._lost_rows(before, after, outputs, batch) if self._finite else {}
        newly = frozenset(row for rows in lost.values() for row in rows) - self._stopped
        stopped = self._stopped | newly
        if lost:
            after = begun_again(
                model.states, after, {row for rows in lost.values() for row in rows}
            )
        if stopped:
            outputs = {n: blanked(values, stopped, batch) for n, values in outputs.items()}
        self._state, self._stopped, self._pending = after, stopped, None
        if stopped or not history:
            self._past.clear()
        else:
            self._past.add(before, feeds)
            self._past.keep(history)
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

    def pieces(self, tokens: np.ndarray) -> list[np.ndarray]:
        """Return the token ids of a prompt, (T,) int64, in pieces that a call each takes."""
        piece = self._model.longest_piece(len(tokens))
        return np.split(tokens, range(piece, len(tokens), piece))

    def rewind(self, tokens: int) -> None:
        """Go back so many tokens: the next step goes on from there.

        A state inside of an earlier step is computed again, together with the next step.

        Raises:
            UsageError: see ``stream(history=...)``; more than that many tokens are not kept.
        """
        with self._lock:
            self._go_back(tokens)

    def verify(
        self,
        tokens: np.ndarray,
        known: int = 1,
        choose: Callable[[np.ndarray], int] = argmax,
    ) -> Verified:
        """Feed token ids of which the last ones are proposals, and keep those that are right.

        A proposal is right if it is what ``choose`` takes of the logits before it, and all
        proposals before it are right. The stream goes on after the last right one. ``choose`` is
        called once for each right proposal, and once more.

        Args:
            tokens: (T,) int64, of one sequence.
            known: number of tokens at the beginning that are no proposals.
            choose: from logits, (vocabulary,), to a token.

        Raises:
            UsageError: not a language model, several rows, or none of the tokens is known.
            NonFiniteError: see ``step``.
        """
        language = language_interface(self._model.manifest)
        if not 1 <= known <= len(tokens):
            raise UsageError(f"known is {known}; expected 1 to {len(tokens)}, the tokens given.")
        feeds, batch = self._model.inputs.bind([{language.tokens: tokens[None]}], {})
        with self._lock:
            held, chosen_from = max(self._history, len(tokens)), len(tokens) - known + 1
            outputs = self._advance(feeds, batch, held, chosen_from)
            logits = outputs[language.logits][0, -chosen_from:]
            chosen: list[int] = []
            try:
                chosen.append(choose(logits[0]))
                for proposal, row in zip(tokens[known:], logits[1:], strict=True):
                    if proposal != chosen[-1]:
                        break
                    chosen.append(choose(row))
            finally:  # nothing was fed where nothing could be chosen
                self._go_back(len(logits) - len(chosen) if chosen else len(tokens))
            self._past.keep(self._history)
        hidden = self._model.manifest.hidden
        kept = None if hidden is None else outputs[hidden][0, : known - 1 + len(chosen)]
        return Verified(tuple(chosen), logits[: len(chosen)], kept)

    def _go_back(self, tokens: int) -> None:
        if tokens and self._state is None:
            raise UsageError(f"This stream has no token yet; it cannot go back {tokens}.")
        waiting = 0 if self._pending is None else self._model.token_axis.length(self._pending)
        if 0 < tokens <= waiting:
            kept = self._model.token_axis.cut(self._pending or {}, 0, waiting - tokens)
            self._pending = kept if tokens < waiting else None
        elif tokens:
            state, pending = self._past.back(tokens - waiting, self._state or {})
            self._state, self._pending = state, pending
            if pending is not None and self._model.token_axis.length(pending) > MOST_PENDING:
                self._catch_up(self._history)

    def _catch_up(self, history: int) -> None:
        """Bring the state up to the tokens that are pending."""
        if self._pending is not None:
            feeds, self._pending = self._pending, None
            batch = (self._model.rows_of(self._state) if self._state else None) or 1
            self._advance(feeds, batch, history)

    def reset(self, rows: Iterable[int] | None = None) -> None:
        """Begin a new sequence, in all rows or in those given.

        Raises:
            UsageError: the row does not exist, or the model has a state that all rows share.
        """
        with self._lock:
            if rows is None:
                self._begin_from(None)
                return
            self._catch_up(0)
            chosen = sorted({*rows})
            shared = self._model.shared_states()
            if shared and self._state is not None:
                raise UsageError(
                    f"The state {shared[0]} is one of all rows together, so that one row cannot "
                    "begin anew. Call reset() for all, or use a stream for each."
                )
            held = (self._model.rows_of(self._state) or 0) if self._state else 0
            if self._state is None or not all(0 <= row < held for row in chosen):
                raise UsageError(f"Found {count_rows(chosen)}; this stream has {held} rows.")
            self._state = begun_again(self._model.states, self._state, chosen)
            self._stopped -= {*chosen}
            self._past.clear()

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
            self._catch_up(self._history)
            held = {name: own_memory(values) for name, values in (self._state or {}).items()}
            return StreamState(self._model.model_sha256, held)

    def restore(self, state: StreamState | str | Path) -> None:
        """Go on from a state, or from the file of one.

        Raises:
            UsageError: not a saved state, one of another model, or one with NaN or infinity.
        """
        named = "The state" if isinstance(state, StreamState) else str(state)
        value = state if isinstance(state, StreamState) else StreamState.load(state)
        self._model.check_state(value, named)
        with self._lock:
            self._begin_from(dict(value.arrays) or None)

    def fork(self) -> Stream:
        """Return a second stream that goes on from here; neither affects the other."""
        other = Stream(self._model, finite=self._finite, history=self._history)
        with self._lock:
            # Arrays are shared: steps and resets make new ones.
            other._state, other._stopped = self._state, self._stopped
            other._past, other._pending = self._past.copy(), self._pending
        return other

    def save(self, path: str | Path, precision: str = "float32") -> None:
        """Write the state to an ``.npz`` file; see ``state`` and ``StreamState.to_bytes``."""
        self.state().save(path, precision)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle as the artifact, which is opened again, and the state."""
        return _resume, (self._model, self._finite, self.state(), self._history)

    def _begin_from(self, state: Arrays | None) -> None:
        self._state, self._stopped, self._pending = state, frozenset(), None
        self._past.clear()

    def _lost_rows(
        self, before: Arrays, after: Arrays, outputs: Arrays, batch: int
    ) -> dict[str, list[int]]:
        axes = {name: s.growing_axis for name, s in self._model.states.items()}
        held = {n: before[n].shape[axis] for n, axis in axes.items() if axis is not None}
        return lost_rows(self._model.states, after, held, outputs, batch)


def _resume(model: Model, finite: bool, state: StreamState, history: int) -> Stream:
    return Stream(model, finite=finite, state=state, history=history)
