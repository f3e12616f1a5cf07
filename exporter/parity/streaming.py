"""Streaming: a sequence fed in pieces, with states carried over, gives what it gives whole.

Outputs may differ by the tolerance of parity, with its allowances for what the original itself
loses to the rounding of float32; states by the tolerance alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from linexport.manifest.proof import StreamingRecord
from linexport.parity.cases import Case, draw_inputs
from linexport.parity.check import ModelUnderTest
from linexport.parity.own_rounding import compare_runs
from linexport.parity.reference import feeds
from linexport.system import memory
from linexport.targets import InferenceSession
from linexport.targets.base import DeviceSession

LENGTH = 150
TRIALS = 4


class InPlace(Protocol):
    """A session that can give a present state the memory of its past."""

    def run(self, inputs: Mapping[str, np.ndarray], in_place: bool = ...) -> dict[str, np.ndarray]:
        """See ``linexport.targets.InferenceSession``."""
        ...


@memory.low_memory()
def check_streaming(tested: ModelUnderTest, seed: int = 0) -> StreamingRecord:
    """Split a sequence at random places, and once into single tokens, and compare.

    States after the last piece must agree as well. A language model's sequence is within its
    context: beyond, frequencies may depend on how much of it a call has.
    """
    language = tested.loaded.language
    if not tested.states:
        if language is not None and language.head in ("sequence_classification", "pooled"):
            whole = f"its output {tested.output_names[0]} is one of a whole sequence"
            return StreamingRecord(None, whole)
        return StreamingRecord(
            None, "the model has no causal operator whose state could be carried"
        )
    sequence = _sequence_dim(tested)
    if sequence is None:
        return StreamingRecord(False, "no dimension of the inputs is a dynamic sequence")
    session = tested.open()
    limits = tested.dims[sequence]
    context = None if language is None else language.context
    length = limits.nearest(LENGTH if context is None else min(LENGTH, context))
    worst, tried = 0.0, []
    for trial in range(TRIALS):
        sizes = {d: tested.traced[d] for d in tested.dims}
        sizes[sequence] = length
        case = Case("stream", sizes, seed + trial)
        pieces = [limits.multiple * n for n in _pieces(length // limits.multiple, trial, seed)]
        tried.append(tuple(pieces))
        error, reason = _one(tested, session, case, sequence, pieces)
        worst = max(worst, error)
        if reason:
            return StreamingRecord(False, reason, worst, tuple(tried))
    return StreamingRecord(True, None, worst, tuple(tried))


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


def _pieces(length: int, trial: int, seed: int) -> list[int]:
    """Lengths that sum to ``length``: single tokens first, then random pieces."""
    if trial == 0:
        return [1] * length
    choose = random.Random(seed + trial)
    cuts = sorted(choose.sample(range(1, length), min(1 + 2 * trial, length - 1)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)]


def _one(
    tested: ModelUnderTest, session: InferenceSession, case: Case, sequence: str, pieces: list[int]
) -> tuple[float, str | None]:
    inputs = feeds(draw_inputs(tested.loaded, tested.input_shapes, case), tested.input_names)
    state = tested.initial_state(tested.batch(case.sizes))
    if isinstance(session, DeviceSession):  # as they are when an artifact is run
        state = session.hold(state)

    shapes = zip(tested.output_names, tested.output_shapes, strict=True)
    axes = {name: list(shape).index(sequence) for name, shape in shapes if sequence in shape}

    def in_pieces(session: InferenceSession) -> dict[str, np.ndarray]:
        """Outputs joined, and states and what has no tokens after the last piece."""
        parts, start, carried = [], 0, state
        for size in pieces:
            piece = {
                name: _cut(inputs[name], shape, sequence, start, size)
                for name, shape in zip(tested.input_names, tested.input_shapes, strict=True)
            }
            part = session.run({**piece, **carried})
            carried = {s.past: part[s.present] for s in tested.states}
            parts.append({name: part[name] for name in tested.output_names})
            start += size
        joined = dict(parts[-1])
        for name, axis in axes.items():
            joined[name] = np.concatenate([part[name] for part in parts], axis=axis)
        return {**joined, **{s.present: np.asarray(carried[s.past]) for s in tested.states}}

    try:
        whole = session.run({**inputs, **state})
        joined = in_pieces(session)
    except Exception as error:
        return float("inf"), f"pieces of {_spell(pieces)} tokens: {str(error).splitlines()[0]}"
    whole = {name: np.asarray(whole[name]) for name in joined}
    found = compare_runs(tested, case, whole, joined, in_pieces)
    worst = max(result.max_relative_error for result in found.values())
    for name, result in found.items():
        if result.passed:
            continue
        if name not in tested.output_names:
            return worst, f"the state {name} differs by {result.max_relative_error:.1e}"
        if name not in axes:
            return worst, (
                f"{name} has no {sequence} axis, and differs by {result.max_relative_error:.1e} "
                f"after the last piece of {_spell(pieces)} tokens: it is one of the whole sequence"
            )
        return worst, (
            f"{name} differs by {result.max_relative_error:.1e} when the sequence is fed in "
            f"pieces of {_spell(pieces)} tokens: an operation besides the fused ones mixes "
            "tokens, or the model loses that much to rounding"
        )
    return worst, None


def _cut(value: np.ndarray, shape: Any, sequence: str, start: int, size: int) -> np.ndarray:
    if sequence not in shape:
        return value
    index: list[Any] = [slice(None)] * value.ndim
    index[list(shape).index(sequence)] = slice(start, start + size)
    return value[tuple(index)]


def _spell(pieces: list[int]) -> str:
    text = ", ".join(map(str, pieces[:8]))
    return text + (", ..." if len(pieces) > 8 else "")
