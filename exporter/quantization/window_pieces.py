"""Windows of text in pieces, and the logits of them that two models are compared by.

    T tokens -> pieces of PIECE tokens -> logits of the last n of each piece

n is PIECE, all of them, unless there are so many words that these would be more than
``LOGITS`` numbers. Then pieces begin at a place that the window's tokens draw: each position is
compared with the same probability, but for the last n of the window, which always are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from linexport.artifact.runtime import Artifact
from linexport.artifact.temporary import Arrays, Run
from linexport.artifact.text.language_interface import LanguageInterface
from linexport.targets.runtime.options import LOGITS_AT, LOGITS_TO_KEEP

PIECE = 128
"""Tokens of a call that gives logits, which two models have at once where they are compared."""

CALL = 512
"""Tokens of a call that gives logits at positions, those of several pieces: a head of many words is
read once for all of them."""

LOGITS = 2**22
"""Logits of a piece that are compared at most: a float64 softmax of them takes 0.1 s."""

DRAWN_BY = 8
"""First tokens of a window that say where its pieces begin."""

Window = NDArray[np.int64]

Outputs = Callable[[Window], Iterator[Arrays]]
"""Yields the outputs of a model for the pieces of a window, with the logits that are compared."""


@dataclass(frozen=True)
class WindowPiece:
    """Tokens of a window that are run in one call.

    Attributes:
        start, end: its place.
        kept: how many of its last tokens have their logits compared.
    """

    start: int
    end: int
    kept: int

    @property
    def positions(self) -> NDArray[np.int64]:
        """Positions in the window whose logits are compared."""
        return np.arange(self.end - self.kept, self.end)

    @property
    def feeds(self) -> dict[str, NDArray]:
        """The input by which a model computes these logits alone."""
        every = self.kept == self.end - self.start
        return {LOGITS_TO_KEEP: np.array([0 if every else self.kept], np.int64)}


Call = Callable[[WindowPiece, Arrays], tuple[Arrays, Arrays]]
"""Runs a piece from a state, of which the first one has none; returns all outputs and the state."""


def pieces(window: Window, vocabulary: int) -> list[WindowPiece]:
    """Cut a window (T,) of a model of so many words."""
    kept = max(1, min(PIECE, LOGITS // vocabulary))
    first = PIECE
    if kept < PIECE:
        first = int(np.random.default_rng(window[:DRAWN_BY]).integers(1, PIECE + 1))
    ends = [*range(first, len(window), PIECE), len(window)]
    starts = [0, *ends[:-1]]
    return [WindowPiece(a, b, min(kept, b - a)) for a, b in zip(starts, ends, strict=True)]


def outputs_of(artifact: Artifact, language: LanguageInterface, run: Run) -> Outputs:
    """Return a function that yields a model's outputs for a window, a piece of it at a time.

    A model without states is run on the whole window.

    Args:
        artifact: names inputs and states.
        language: names the logits.
        run: the model.
    """
    pasts = {s.present: s.past for s in artifact.manifest.states}
    if not pasts:
        return whole_outputs(artifact, language, run)

    def found(window: Window) -> Iterator[Arrays]:
        def call(piece: WindowPiece, state: Arrays) -> tuple[Arrays, Arrays]:
            tokens = artifact.feeds(window[None, piece.start : piece.end])
            outputs = run({**tokens, **piece.feeds, **state})
            return outputs, {past: outputs[present] for present, past in pasts.items()}

        return in_pieces(window, language, call)

    return found


def outputs_at(artifact: Artifact, language: LanguageInterface, run: Run) -> Outputs:
    """Return what ``outputs_of`` does, of a model that computes logits at given positions.

    Args:
        artifact: names inputs and states, of which there are some.
        language: names the logits.
        run: the model; ``LOGITS_AT`` of its inputs has places (1, n) of a call.
    """
    pasts = {s.present: s.past for s in artifact.manifest.states}

    def found(window: Window) -> Iterator[Arrays]:
        state: Arrays = {}
        for call in _together(pieces(window, language.vocabulary)):
            start, end = call[0].start, call[-1].end
            at = np.concatenate([piece.positions for piece in call])[None] - start
            outputs = run({**artifact.feeds(window[None, start:end]), LOGITS_AT: at, **state})
            state = {past: outputs[present] for present, past in pasts.items()}
            parts = np.cumsum([piece.kept for piece in call])[:-1]
            for logits in np.split(outputs[language.logits], parts, axis=1):
                yield {**outputs, language.logits: logits}

    return found


def _together(cut: Sequence[WindowPiece]) -> Iterator[list[WindowPiece]]:
    """Yield pieces that follow one another, up to ``CALL`` tokens."""
    call: list[WindowPiece] = []
    for piece in cut:
        if call and piece.end - call[0].start > CALL:
            yield call
            call = []
        call.append(piece)
    yield call


def has_few_logits(language: LanguageInterface) -> bool:
    """Return whether some logits of a piece are compared, and not all."""
    return language.vocabulary * PIECE > LOGITS


def whole_outputs(artifact: Artifact, language: LanguageInterface, run: Run) -> Outputs:
    """Return the same for a model that carries no states: it is run once, and its logits are cut.

    Args:
        artifact: names inputs.
        language: names the logits.
        run: the model.
    """

    def found(window: Window) -> Iterator[Arrays]:
        return cut_logits(window, language, run(artifact.feeds(window[None])))

    return found


def in_pieces(window: Window, language: LanguageInterface, call: Call) -> Iterator[Arrays]:
    """Yield the outputs of calls for the pieces of a window, with the logits that are compared.

    Args:
        window: tokens (T,).
        language: names the logits.
        call: runs a piece.
    """
    state: Arrays = {}
    for piece in pieces(window, language.vocabulary):
        outputs, state = call(piece, state)
        yield {**outputs, language.logits: outputs[language.logits][:, -piece.kept :]}


def cut_logits(window: Window, language: LanguageInterface, outputs: Arrays) -> Iterator[Arrays]:
    """Yield the logits that are compared of each piece, from those of a whole window.

    Args:
        window: tokens (T,).
        language: names the logits.
        outputs: of the window, logits (1, T, V) among them.
    """
    for piece in pieces(window, language.vocabulary):
        yield {language.logits: outputs[language.logits][:, piece.positions]}
