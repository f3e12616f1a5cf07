"""Streaming: a sequence fed in pieces, with states carried over, gives what it gives whole.

A short sequence is cut in several ways, a long one once: past twice every constant by which the
model reaches back, and over ``LONG_STREAM`` tokens where that does not take long. Outputs may
differ by the tolerance of parity, with its allowances for what the original itself loses to the
rounding of float32; states by the tolerance alone.

What a sequence gives whole is computed once, for all ways in which it is cut and for every way in
which the same graph is run: the CPU library's pieces are compared with what functions gave.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from linexport.graph.dims import PAST, DimRange
from linexport.manifest.proof import StreamingRecord
from linexport.parity.cases import Case, draw_inputs
from linexport.parity.check import ModelUnderTest
from linexport.parity.compare import Comparison
from linexport.parity.language.split import split_model
from linexport.parity.noise.own_rounding import compare_runs
from linexport.parity.reference.module import feeds
from linexport.parity.streams.carried_calls import check_calls, writes_buffers
from linexport.parity.streams.splits import (
    BEHIND,
    FAR_CALL,
    LONG_STREAM,
    LONGEST_CALL,
    Split,
    long,
    usual,
)
from linexport.parity.streams.whole_runs import WholeRuns
from linexport.system import memory
from linexport.system.untyped import ArrayLike
from linexport.targets import InferenceSession
from linexport.targets.base import DeviceSession

log = logging.getLogger(__name__)

LANGUAGE = 4_096
"""Tokens after which the states of a language model are compared."""

LANGUAGE_CALL = 1_024
"""Tokens of one call of a language model: as many as parity compares with the original."""

PATIENCE, PATIENCE_BEHIND, PATIENCE_LANGUAGE = 10.0, 60.0, 120.0
"""Seconds that a long sequence may take: any, one past what constants reach, a language model's."""

STEP = 600
"""Tokens of a sequence that is tried where a long one might take too long."""

FEW_SINGLE = 40
"""Single tokens of the short sequence of a model of many words, each of which reads all weights."""

KEPT = 2**27
"""Bytes of outputs that are compared at every token; of more, single tokens are."""


class InPlace(Protocol):
    """A session that can give a present state the memory of its past."""

    def run(self, inputs: Mapping[str, np.ndarray], in_place: bool = ...) -> dict[str, np.ndarray]:
        """See ``linexport.targets.InferenceSession``."""
        ...


@dataclass(frozen=True)
class _Timed:
    """Seconds that a comparison took.

    Attributes:
        length: tokens of its longest call.
        whole: seconds of its few calls.
        call: seconds of one of its many.
    """

    length: int
    whole: float
    call: float


@dataclass(frozen=True)
class OtherKernels:
    """Whole sequences that the same graph was given with other kernels.

    Attributes:
        runs: of them.
        rounding: gives what the original loses in sequences of so many tokens, by output.
    """

    runs: WholeRuns
    rounding: Callable[[int], Mapping[str, float]]


@dataclass(frozen=True)
class _Whole:
    """Results of a sequence that was run whole.

    Attributes:
        outputs: and states after its last token.
        model: that gave them.
        rounding: of the original in other cases, by output.
        seconds: of its calls; None where they were made before.
    """

    outputs: Mapping[str, np.ndarray]
    model: ModelUnderTest
    rounding: Mapping[str, float] = field(default_factory=dict)
    seconds: float | None = None


@memory.low_memory()
def check_streaming(
    tested: ModelUnderTest,
    seed: int = 0,
    runs: WholeRuns | None = None,
    against: OtherKernels | None = None,
    single: int | None = None,
) -> StreamingRecord:
    """Split a short sequence into single tokens and at random places, then a long one; compare.

    States after the last piece must agree as well. A language model's sequence is within its
    context: beyond, frequencies may depend on how much of it a call has. Of one of many words
    hidden states are compared: its head is the same product for every token, see ``split``.

    Args:
        tested: the model.
        seed: of the sequences.
        runs: gets what they give whole.
        against: what pieces are compared with in place of this model's own whole runs.
        single: single tokens of the short sequence; None for ``FEW_SINGLE`` of a model of many
            words, and else for all.
    """
    own = WholeRuns() if runs is None else runs
    parts = split_model(tested)
    if parts is not None:
        try:
            found = _checked(parts.decoder, seed, own, against, FEW_SINGLE)
        except Exception as error:  # of ONNX Runtime, which has no class for its own
            log.info("hidden states are not compared: %r", error)
        else:
            if found.passed is not False:
                return found
        memory.trim_memory()
    return _checked(tested, seed, own, against, single)


def _checked(
    tested: ModelUnderTest,
    seed: int,
    own: WholeRuns,
    against: OtherKernels | None,
    single: int | None = None,
) -> StreamingRecord:
    language = tested.loaded.language
    if not tested.states:
        if language is not None and language.head in ("sequence_classification", "pooled"):
            whole = f"its output {tested.output_names[0]} is one of a whole sequence"
            return StreamingRecord(None, whole)
        return StreamingRecord(
            None, "the model has no causal operator whose state could be carried"
        )
    if writes_buffers(tested):
        return check_calls(tested, seed)
    sequence = _sequence_dim(tested)
    if sequence is None:
        return StreamingRecord(False, "no dimension of the inputs is a dynamic sequence")
    return _Check(tested, sequence, seed, own, against).run(single)


def check_in_place(tested: ModelUnderTest, session: InPlace, seed: int = 0) -> str | None:
    """Return the fault when every present state takes the memory of its past; None without."""
    sizes = {d: tested.traced[d] for d in tested.dims}
    case = Case("in place", sizes, seed)
    inputs = feeds(draw_inputs(tested.loaded, tested.input_shapes, case), tested.input_names)
    state = tested.initial_state(tested.batch(sizes))
    first = session.run({**inputs, **state})
    carried = {s.past: first[s.present] for s in tested.states}
    apart = session.run({**inputs, **carried})
    together = session.run({**inputs, **carried}, in_place=True)
    wrong = [n for n, x in apart.items() if not np.array_equal(x, together[n], equal_nan=True)]
    return f"{wrong[0]} differs when states are updated in place" if wrong else None


def _sequence_dim(tested: ModelUnderTest) -> str | None:
    """The dimension along which states are advanced: any but the batch of the states."""
    batch = tested.states[0].shape[0]
    named = [d for shape in tested.input_shapes for d in shape if isinstance(d, str)]
    return next((d for d in named if d != batch), None)


class _Check:
    """The comparisons of one artifact, and how long they took."""

    def __init__(
        self,
        tested: ModelUnderTest,
        sequence: str,
        seed: int,
        own: WholeRuns,
        against: OtherKernels | None,
    ) -> None:
        self.tested, self.sequence, self.seed = tested, sequence, seed
        self.own, self.against = own, against
        self.session = tested.open()
        self.limits: DimRange = tested.dims[sequence]
        shapes = zip(tested.output_names, tested.output_shapes, strict=True)
        self.axes = {n: list(shape).index(sequence) for n, shape in shapes if sequence in shape}
        self.timed: list[_Timed] = []
        self.worst, self.tried = 0.0, list[tuple[int, ...]]()

    def run(self, single: int | None) -> StreamingRecord:
        """Compare all splits until one fails; ``single``: see ``usual``."""
        longest = self._longest()
        sizes = {d: self.tested.traced[d] for d in self.tested.dims}
        for split in usual(self.limits, longest, self.seed, single):
            case = Case("stream", {**sizes, self.sequence: split.length}, self.seed)
            reason = self._compare(case, split) if split.compares else None
            if reason:
                return self._record(False, reason)
        reason, skipped = self._long(longest)
        if reason:
            return self._record(False, reason)
        if not self.tried:
            return self._record(
                False,
                f"nothing was compared: {self.sequence} is {self.limits.min} to "
                f"{self.limits.max or 'any'}{', ' * bool(self.limits.steps)}{self.limits.steps}, "
                "so that no sequence has two pieces",
            )
        return replace(self._record(True, None), skipped=skipped)

    def _record(self, passed: bool, reason: str | None) -> StreamingRecord:
        return StreamingRecord(passed, reason, self.worst, tuple(self.tried))

    def _longest(self) -> int | None:
        """Return the most tokens of a sequence that the artifact is made for; None for any."""
        language, past = self.tested.loaded.language, self.tested.dims.get(PAST)
        given = [None if language is None else language.context, None if past is None else past.max]
        return min((n for n in given if n is not None), default=None)

    def _long(self, longest: int | None) -> tuple[str | None, str | None]:
        """Compare the longest sequence that patience allows.

        Returns the fault, and what was left out.
        """
        skipped = None
        for wanted, patience in self._lengths():
            length = wanted if longest is None else min(wanted, longest)
            if self.tried and length <= sum(self.tried[-1]):
                break
            split = self._split(length)
            if self._seconds(split) > patience and length > STEP:
                reason = self._step(patience)
                if reason:
                    return reason, skipped
            seconds = self._seconds(split)
            if seconds > patience:
                skipped = skipped or f"{length:,} tokens would take {seconds:.0f} s"
                continue
            return self._compare_long(split), skipped
        return None, skipped

    def _step(self, patience: float) -> str | None:
        """Compare a sequence of ``STEP`` tokens, which tells how time grows with the length."""
        split = self._split(STEP)
        known = {timed.length for timed in self.timed}
        if max(split.calls) in known or self._seconds(split) > patience:
            return None
        return self._compare_long(split)

    def _compare_long(self, split: Split) -> str | None:
        sizes = {
            d: limits.nearest(1) if limits.batch else self.tested.traced[d]
            for d, limits in self.tested.dims.items()
        }
        case = Case("long stream", {**sizes, self.sequence: split.length}, self.seed)
        return self._compare(case, split) if split.compares else None

    def _lengths(self) -> Iterator[tuple[int, float]]:
        """Yield lengths worth a comparison, the longest first, and the seconds each may take."""
        found = [(LONG_STREAM, PATIENCE), (self.tested.behind, PATIENCE_BEHIND)]
        if self.tested.loaded.language is not None:
            found.append((LANGUAGE, PATIENCE_LANGUAGE))
        yield from sorted(found, reverse=True)

    def _split(self, length: int) -> Split:
        far = length > LONGEST_CALL + BEHIND
        call = FAR_CALL if far else LONGEST_CALL
        call = call if self.tested.loaded.language is None else LANGUAGE_CALL
        call = max(self.limits.multiple, min(call, KEPT // self._bytes_a_token()))
        return long(self.limits, length, self.tested.reaches, call, self.seed)

    def _bytes_a_token(self) -> int:
        """Return the size of the outputs of one token."""
        shapes = [s for s in self.tested.output_shapes if self.sequence in s]
        return 4 * sum(math.prod(n for n in s if isinstance(n, int)) for s in shapes) or 1

    def _seconds(self, split: Split) -> float:
        """Return about how long a split takes: as pairs of tokens do, where no more is known."""
        if not self.timed:
            return 0.0
        *before, last = sorted(self.timed, key=lambda timed: timed.length)
        share, power = max(split.calls) / last.length, 2.0
        shorter = [timed for timed in before if 2 * timed.length <= last.length]
        if shorter:
            growth = math.log(last.whole / shorter[-1].whole)
            power = min(max(growth / math.log(last.length / shorter[-1].length), 1.0), 2.0)
        whole = len(split.calls) * last.whole * share ** (power if share > 1 else 1.0)
        return 2 * whole + len(split.pieces) * last.call

    def _compare(self, case: Case, split: Split) -> str | None:
        """Run a split; return what is wrong with it."""
        self.tried.append(split.pieces)
        tested, run = self.tested, _Run(self, case)
        beyond = self.limits.max is not None and split.length > self.limits.max
        try:
            whole = self._whole(case, split, run)
            begin = time.perf_counter()
            second = run(self.session, split.pieces)
            seconds = time.perf_counter() - begin
        except Exception as error:
            if beyond:  # a table may end there
                self.tried.pop()
                return None
            self.worst = float("inf")
            log.info("the artifact does not run in pieces: %s", error)
            return (
                f"the model does not take {split.length:,} tokens in pieces of "
                f"{_spell(split.pieces)} tokens, by the states that it would have"
            )
        longest = max(split.calls)
        call = seconds * longest / split.length
        if whole.seconds is not None:
            call = whole.seconds / len(split.calls)
        self.timed.append(_Timed(longest, call, seconds / len(split.pieces)))
        found = compare_runs(
            whole.model,
            case,
            whole.outputs,
            second,
            lambda other: run(other, split.pieces),
            tested,
            whole.rounding,
            run.chosen,
        )
        self.worst = max(self.worst, *(result.max_relative_error for result in found.values()))
        return self._fault(found, split)

    def _whole(self, case: Case, split: Split, run: _Run) -> _Whole:
        """Return what a sequence gives in few calls, which are made unless they were before."""
        if self.against is not None:
            known = self.against.runs.find(self.tested, case, split)
            if known is not None:
                rounding = self.against.rounding(split.length)
                return _Whole(known, self.against.runs.model(self.tested), rounding)
        known = self.own.find(self.tested, case, split)
        if known is not None:
            return _Whole(known, self.tested)
        begin = time.perf_counter()
        made = run(self.session, split.calls)
        seconds = time.perf_counter() - begin
        return _Whole(self.own.keep(self.tested, case, split, made), self.tested, seconds=seconds)

    def _fault(self, found: Mapping[str, Comparison], split: Split) -> str | None:
        for name, result in found.items():
            if result.passed:
                continue
            error = f"differs by {result.max_relative_error:.1e}"
            if name not in self.tested.output_names:
                return f"the state {name} {error} after {split.length:,} tokens"
            if name not in self.axes:
                return (
                    f"{name} has no {self.sequence} axis, and {error} after the last piece of "
                    f"{_spell(split.pieces)} tokens: it is one of the whole sequence"
                )
            return (
                f"{name} {error} when a sequence of {split.length:,} tokens is fed in pieces of "
                f"{_spell(split.pieces)} tokens: an operation besides the fused ones mixes tokens, "
                "or the model loses that much to rounding"
            )
        return None


class _Run:
    """One sequence, to be run in calls of any lengths.

    Outputs of tokens are kept where there is room, else those of the last single tokens.
    """

    def __init__(self, check: _Check, case: Case) -> None:
        tested = check.tested
        self.check, self.tested = check, tested
        drawn = draw_inputs(tested.loaded, tested.input_shapes, case)
        self.inputs = feeds(drawn, tested.input_names)
        self.begin = tested.initial_state(tested.batch(case.sizes))
        if isinstance(check.session, DeviceSession):  # as they are when an artifact is run
            self.begin = check.session.hold(self.begin)
        length = case.sizes[check.sequence]
        self.last = length if length * check._bytes_a_token() <= KEPT else BEHIND

    def __call__(self, session: InferenceSession, calls: Sequence[int]) -> dict[str, np.ndarray]:
        """Return outputs joined, and states and what has no tokens after the last call."""
        parts, start, carried = [], 0, self.begin
        for size in calls:
            fed = {
                name: self._cut(self.inputs[name], shape, start, size)
                for name, shape in zip(
                    self.tested.input_names, self.tested.input_shapes, strict=True
                )
            }
            part = session.run({**fed, **carried})
            carried = {s.past: part[s.present] for s in self.tested.states}
            parts.append(self.chosen({n: part[n] for n in self.tested.output_names}))
            start += size
        joined = dict(parts[-1])
        for name, axis in self.check.axes.items():
            joined[name] = np.concatenate([np.asarray(part[name]) for part in parts], axis=axis)
        ends = {s.present: np.asarray(carried[s.past]) for s in self.tested.states}
        return {**{n: np.asarray(x) for n, x in self.chosen(joined).items()}, **ends}

    def chosen(self, outputs: Mapping[str, ArrayLike]) -> dict[str, ArrayLike]:
        """Return outputs at the tokens that are compared."""
        found = dict(outputs)
        for name, axis in self.check.axes.items():
            if name in found and found[name].shape[axis] > self.last:
                index = (slice(None),) * axis + (slice(-self.last, None),)
                found[name] = np.asarray(found[name])[index]
        return found

    def _cut(self, value: np.ndarray, shape: Any, start: int, size: int) -> np.ndarray:
        if self.check.sequence not in shape:
            return value
        index: list[Any] = [slice(None)] * value.ndim
        index[list(shape).index(self.check.sequence)] = slice(start, start + size)
        return value[tuple(index)]


def _spell(pieces: Sequence[int]) -> str:
    text = ", ".join(map(str, pieces[:8]))
    return text + (", ..." if len(pieces) > 8 else "")
