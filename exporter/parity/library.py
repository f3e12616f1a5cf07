"""The CPU library beside the functions that nodes carry: the same file run both ways.

The original was compared with the functions. Here the library is compared with them, at the same
sizes, outputs and states, and then on sequences in pieces with what the functions gave for them
whole, or with itself where they were not run. Outputs may differ by the tolerance of parity, with
its allowances for what the original itself loses to rounding.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from linexport.manifest.proof import LibraryRecord, ParityRecord
from linexport.parity.cases import MAGNITUDES, Case, draw_inputs, plan_cases
from linexport.parity.check import ModelUnderTest
from linexport.parity.image_cost import sides
from linexport.parity.language.prompts import PROMPT_LENGTHS, SEQUENCE
from linexport.parity.language.split import split_model
from linexport.parity.noise.own_rounding import compare_runs
from linexport.parity.reference.module import feeds
from linexport.parity.streams.check import FEW_SINGLE, OtherKernels, check_streaming
from linexport.parity.streams.whole_runs import WholeRuns
from linexport.plugins.cpu import library
from linexport.system import memory
from linexport.targets import InferenceSession
from linexport.targets.cpu_fusion.version import native_version

log = logging.getLogger(__name__)

Arrays = Mapping[str, np.ndarray]
Reference = Literal["functions", "original"]

NOT_BUILT = "the CPU library is not built here, or is switched off"
UNKNOWN_NODE = "the CPU library does not compute a node of this model: -v says which"

WHOLE_TOKENS = 512
"""Tokens of all rows of a case of a model of many words, at most; streams have longer calls."""


@memory.low_memory()
def check_library(
    tested: ModelUnderTest,
    with_library: ModelUnderTest,
    functions: ParityRecord | None,
    seed: int = 0,
    runs: WholeRuns | None = None,
) -> LibraryRecord:
    """Run the planned cases by the functions and by the library, and compare.

    Args:
        tested: the converted model; it is opened with functions.
        with_library: the same; it is opened with the library.
        functions: parity of the functions, whose allowances for rounding hold here as well.
        seed: of the inputs.
        runs: sequences that functions were given whole; None where they were not run.
    """
    if library.find() is None:
        return not_run("functions", NOT_BUILT)
    parts = split_model(tested), split_model(with_library)
    if parts[0] is not None and parts[1] is not None:
        found = _checked(parts[0].decoder, parts[1].decoder, functions, seed, runs, WHOLE_TOKENS)
        if found.passed is not False:
            return found
    return _checked(tested, with_library, functions, seed, runs)


def _checked(
    tested: ModelUnderTest,
    with_library: ModelUnderTest,
    functions: ParityRecord | None,
    seed: int,
    runs: WholeRuns | None,
    most: int | None = None,
) -> LibraryRecord:
    session = with_library.open()
    if not by_library(session):
        return not_run("functions", UNKNOWN_NODE)
    with_library = replace(with_library, open=lambda: session)
    cases, left = _cases(tested, seed, functions), list[Case]()
    if most is not None and runs is not None and tested.states:
        streamed = runs.longest_call(tested)
        left = [c for c in cases if math.prod(c.sizes.values()) > most and _length(c) <= streamed]
    compare = partial(_on_cases, tested, with_library, functions)
    tried, worst, reason = compare([case for case in cases if case not in left])
    if tested.states and not reason:
        against = None if runs is None else OtherKernels(runs, partial(_rounding, functions))
        single = None if most is None else FEW_SINGLE
        pieces = check_streaming(with_library, seed, against=against, single=single)
        tried, worst = tried + len(pieces.splits), max(worst, pieces.max_relative_error or 0.0)
        if pieces.passed is False:
            reason = f"in pieces: {pieces.reason}"
        elif left and max(map(max, pieces.splits), default=0) < max(map(_length, left)):
            more, error, reason = compare(left)
            tried, worst = tried + more, max(worst, error)
    return record("functions", reason is None, tried, worst, reason)


def _on_cases(
    tested: ModelUnderTest,
    with_library: ModelUnderTest,
    functions: ParityRecord | None,
    cases: Sequence[Case],
) -> tuple[int, float, str | None]:
    """Compare whole sequences: how many, the largest error, and what is wrong."""
    expected, worst = _by_functions(tested, cases), 0.0
    for case, wanted in expected:
        lost = _rounding(functions, _length(case))
        error, reason = _compare(tested, with_library, case, wanted, lost)
        worst = max(worst, error)
        if reason:
            return len(expected), worst, reason
    return len(expected), worst, None


def proven(found: ParityRecord, session: InferenceSession) -> LibraryRecord:
    """Return the record of a library that was compared with the original itself."""
    if library.find() is None:
        return not_run("original", NOT_BUILT)
    if not by_library(session):
        return not_run("original", UNKNOWN_NODE)
    reason = None if found.passed else "parity failed"
    return record("original", found.passed, len(found.cases), found.max_relative_error, reason)


def by_library(session: object) -> bool:
    """Return whether the CPU library runs an opened model."""
    return bool(getattr(session, "native", False))


def not_run(against: Reference, reason: str) -> LibraryRecord:
    """Return the record of a library that was not run."""
    return LibraryRecord(against, None, reason)


def record(
    against: Reference, passed: bool, cases: int, error: float | None, reason: str | None = None
) -> LibraryRecord:
    """Return the record of a comparison with the library of this installation."""
    return LibraryRecord(
        against,
        passed,
        reason,
        native_version(),
        library.instruction_set(),
        cases,
        error if error is not None and np.isfinite(error) else None,
    )


def _cases(tested: ModelUnderTest, seed: int, functions: ParityRecord | None) -> list[Case]:
    """Return the sizes to compare at; the longest is that of parity."""
    cases = plan_cases(tested.dims, tested.traced, False, seed, tested.input_shapes, tested.chosen)
    if functions is not None and functions.cases:
        sizes = (size for case in functions.cases for size in case.sizes.values())
        most = max(sizes, default=1)
        cases = [_within(case, tested, most) for case in cases]
    longest = max(PROMPT_LENGTHS)
    if tested.loaded.language is None or tested.chosen.lengths:
        return cases
    long = [case for case in cases if case.sizes[SEQUENCE] > longest]
    shorter = [replace(case, sizes={**case.sizes, SEQUENCE: longest}) for case in long]
    return [*(case for case in cases if case not in long), *shorter]


def _within(case: Case, tested: ModelUnderTest, most: int) -> Case:
    """Return a case whose images have no side beyond that of those which parity could afford."""
    if _length(case) <= most:
        return case
    if len(sides(tested.dims, tested.input_shapes)) < 2:
        return case
    lengths = {name for name, limits in tested.dims.items() if not limits.batch}
    nearest = {name: tested.dims[name].nearest(most) for name in lengths}
    sizes = {n: min(size, nearest.get(n, size)) for n, size in case.sizes.items()}
    return replace(case, sizes=sizes)


def _length(case: Case) -> int:
    return max(case.sizes.values(), default=1)


def _inputs(tested: ModelUnderTest, case: Case) -> dict[str, np.ndarray]:
    drawn = draw_inputs(tested.loaded, tested.input_shapes, case)
    state = tested.initial_state(tested.batch(case.sizes))
    return {**feeds(drawn, tested.input_names), **state}


def _by_functions(tested: ModelUnderTest, cases: Sequence[Case]) -> list[tuple[Case, Arrays]]:
    """Each case with its outputs; parity has told at which sizes the original itself fails."""
    session = tested.open()
    outputs: list[tuple[Case, Arrays]] = []
    for case in cases:
        with suppress(Exception):  # ONNX Runtime has no class for its own
            outputs.append((case, _kept(session.run(_inputs(tested, case)))))
    del session
    memory.trim_memory()
    return outputs


def _kept(outputs: Arrays) -> dict[str, np.ndarray]:
    return dict(zip(outputs, memory.memory_mapped(list(outputs.values())), strict=True))


def _rounding(functions: ParityRecord | None, length: int) -> dict[str, float]:
    """Return the most that the original itself loses to rounding, by output.

    In no longer cases, and of no other magnitude: what large inputs lose is more than all that
    usual ones give.
    """
    lost: dict[str, float] = {}
    for case in () if functions is None else functions.cases:
        if case.length <= length and case.name not in MAGNITUDES:
            lost[case.output] = max(lost.get(case.output, 0.0), case.rounding or 0.0)
    return lost


def _compare(
    tested: ModelUnderTest,
    with_library: ModelUnderTest,
    case: Case,
    wanted: Arrays,
    rounding: Mapping[str, float],
) -> tuple[float, str | None]:
    """The largest error of a case, and what is wrong."""
    try:
        got = with_library.open().run(_inputs(tested, case))
    except Exception as error:  # ONNX Runtime has no class for its own
        log.info("the CPU library does not run the model: %s", error)
        return float("inf"), f"it does not run the model at {case.at}"

    def again(session: InferenceSession) -> None:
        session.run(_inputs(tested, case))

    found = compare_runs(tested, case, wanted, got, again, with_library, rounding)
    worst = max(result.max_relative_error for result in found.values())
    wrong = next((name for name, result in found.items() if not result.passed), None)
    return worst, None if wrong is None else f"{wrong} differs at {case.at}"
