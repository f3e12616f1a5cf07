"""Streaming: a sequence fed in pieces, with states carried over, gives what it gives whole."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from linexport.parity.cases import Case, draw
from linexport.parity.check import Subject
from linexport.parity.compare import Comparison, compare, largest
from linexport.parity.original import rounding_of
from linexport.parity.reference import Inputs, feeds

LENGTH = 150
TRIALS = 4

PROBE = 16
"""Tokens that tell what a difference of states is worth."""


class InPlace(Protocol):
    """A session that can give a present state the memory of its past."""

    def run(self, inputs: Mapping[str, np.ndarray], in_place: bool = ...) -> dict[str, np.ndarray]:
        """See ``linexport.targets.Session``."""
        ...


@dataclass(frozen=True)
class Streaming:
    """Outcome; ``passed`` is None where there is nothing to stream, with the reason.

    Attributes:
        max_relative_error: of outputs, and of states after the last piece.
        splits: the pieces tried, in tokens.
        rounding: what the original itself loses of its largest output to the rounding of float32,
            where pieces were allowed a multiple of it; else 0.
    """

    passed: bool | None
    reason: str | None
    max_relative_error: float | None = None
    splits: tuple[tuple[int, ...], ...] = ()
    rounding: float = 0.0

    def json(self) -> dict[str, Any]:
        """As written to the manifest."""
        return {**asdict(self), "splits": [list(s) for s in self.splits]}


def check_streaming(subject: Subject, seed: int = 0) -> Streaming:
    """Split a sequence at random places, and once into single tokens, and compare.

    States after the last piece must agree as well, or else the outputs that follow from them. As
    in parity, outputs may be off by a multiple of what the original loses to rounding.
    """
    if not subject.states:
        return Streaming(None, "the model has no causal operator whose state could be carried")
    sequence = _sequence_dim(subject)
    if sequence is None:
        return Streaming(False, "no dimension of the inputs is a dynamic sequence")
    for name, shape in zip(subject.output_names, subject.output_shapes, strict=True):
        if sequence not in shape:
            return Streaming(
                False, f"the output {name} has no {sequence} axis to join pieces along"
            )
    limits = subject.dims[sequence]
    length = min(LENGTH, limits.max or LENGTH)
    worst, rounding, tried = 0.0, 0.0, []
    for trial in range(TRIALS):
        sizes = {d: subject.traced[d] for d in subject.dims}
        sizes[sequence] = length
        inputs = draw(subject.loaded, subject.input_shapes, Case("stream", sizes, seed + trial))
        pieces = _pieces(length, trial, seed)
        tried.append(tuple(pieces))
        attempt = _Attempt(subject, inputs, sequence, subject.batch(sizes))
        reason = attempt.reason_against(pieces)
        worst, rounding = max(worst, attempt.worst), max(rounding, attempt.rounding)
        if reason:
            return Streaming(False, reason, worst, tuple(tried), rounding)
    return Streaming(True, None, worst, tuple(tried), rounding)


def check_in_place(subject: Subject, session: InPlace, seed: int = 0) -> str | None:
    """What is wrong when every present state takes the memory of its past; None if nothing is."""
    sizes = {d: subject.traced[d] for d in subject.dims}
    case = Case("in place", sizes, seed)
    inputs = feeds(draw(subject.loaded, subject.input_shapes, case), subject.input_names)
    state = subject.initial_state(subject.batch(sizes))
    first = session.run({**inputs, **state})
    carried = {s.past: first[s.present] for s in subject.states}
    apart = session.run({**inputs, **carried})
    together = session.run({**inputs, **carried}, in_place=True)
    wrong = [n for n, x in apart.items() if not np.array_equal(x, together[n], equal_nan=True)]
    return f"{wrong[0]} differs when states are updated in place" if wrong else None


def _sequence_dim(subject: Subject) -> str | None:
    """The dimension along which states are advanced: any but the batch of the states."""
    batch = subject.states[0].shape[0]
    named = [d for shape in subject.input_shapes for d in shape if isinstance(d, str)]
    return next((d for d in named if d != batch), None)


def _pieces(length: int, trial: int, seed: int) -> list[int]:
    """Lengths that sum to ``length``: single tokens first, then random pieces."""
    if trial == 0:
        return [1] * length
    choose = random.Random(seed + trial)
    cuts = sorted(choose.sample(range(1, length), min(1 + 2 * trial, length - 1)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)]


class _Attempt:
    """One sequence, whole and in pieces.

    Attributes:
        worst: largest relative error so far.
        rounding: see ``Streaming``.
    """

    def __init__(self, subject: Subject, inputs: Inputs, sequence: str, batch: int) -> None:
        self.subject, self.inputs, self.sequence = subject, inputs, sequence
        self.fed = feeds(inputs, subject.input_names)
        self.initial = subject.initial_state(batch)
        self.worst = self.rounding = 0.0

    def reason_against(self, pieces: list[int]) -> str | None:
        """Why these pieces do not give what the whole gives; None if they do."""
        tokens = f"pieces of {_spell(pieces)} tokens"
        try:
            whole, after = self._feed([sum(pieces)], self.initial)
            joined, state = self._feed(pieces, self.initial)
        except Exception as error:
            return f"{tokens}: {str(error).splitlines()[0]}"
        found = self._outputs_differ(whole, joined)
        if found:
            return (
                f"{found[0]} differs by {found[1].max_relative_error:.1e} when the sequence is fed "
                f"in {tokens}: an operation besides the fused ones mixes tokens, or the model "
                "loses that much to rounding"
            )
        return self._states_differ(after, state)

    def _feed(
        self, pieces: list[int], state: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Outputs of the sequence's first tokens in such pieces, and the states after them."""
        subject, parts, start = self.subject, [], 0
        for size in pieces:
            piece = {
                name: _cut(self.fed[name], shape, self.sequence, start, size)
                for name, shape in zip(subject.input_names, subject.input_shapes, strict=True)
            }
            part = subject.session.run({**piece, **state})
            state = {s.past: part[s.present] for s in subject.states}
            parts.append({name: part[name] for name in subject.output_names})
            start += size
        axes = [list(shape).index(self.sequence) for shape in subject.output_shapes]
        named = zip(subject.output_names, axes, strict=True)
        return {n: np.concatenate([p[n] for p in parts], axis) for n, axis in named}, dict(state)

    def _outputs_differ(
        self, whole: Mapping[str, np.ndarray], joined: Mapping[str, np.ndarray]
    ) -> tuple[str, Comparison] | None:
        """The first output that does, by more than the original's own rounding excuses."""
        own: list[float] | None = None
        for position, (name, expected) in enumerate(whole.items()):
            result = compare(expected, joined[name], self.subject.tolerance)
            if not result.passed:
                own = own or rounding_of(self.subject.loaded, self.inputs)
                lost, share = own[position], own[position] / (largest(expected) or 1.0)
                result = compare(expected, joined[name], self.subject.tolerance, lost)
                self.rounding = max(self.rounding, share if result.passed else 0.0)
            self.worst = max(self.worst, result.max_relative_error)
            if not result.passed:
                return name, result
        return None

    def _states_differ(
        self, after: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]
    ) -> str | None:
        """Why the states after the pieces are not as good as those after the whole."""
        told = ""
        for held in self.subject.states:
            result = compare(after[held.past], state[held.past], self.subject.tolerance)
            self.worst = max(self.worst, result.max_relative_error)
            if not result.passed:
                told = (
                    told or f"the state {held.present} differs by {result.max_relative_error:.1e}"
                )
        if not told:
            return None
        try:
            followed = [self._feed([PROBE], s)[0] for s in (after, state)]
        except Exception as error:
            return f"{told}, and nothing can follow: {str(error).splitlines()[0]}"
        found = self._outputs_differ(*followed)
        return f"{told}, and {found[0]} after it" if found else None


def _cut(value: np.ndarray, shape: Any, sequence: str, start: int, size: int) -> np.ndarray:
    if sequence not in shape:
        return value
    index: list[Any] = [slice(None)] * value.ndim
    index[list(shape).index(sequence)] = slice(start, start + size)
    return value[tuple(index)]


def _spell(pieces: list[int]) -> str:
    text = ", ".join(map(str, pieces[:8]))
    return text + (", ..." if len(pieces) > 8 else "")
