"""Two runs of an artifact on one case, with what the original itself loses to rounding there.

Where a norm divides by nearly nothing one token in thousands has errors of 5e-5, in the original as
in the artifact; where two scores of a router are nearly the same, rounding takes one expert or the
other. Both are looked at where the runs differ by more than the tolerance. Rounding is known row by
row, as for language models: of the original's own run, and of random roundings where that one was
right by chance, see ``random_rounding``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType

import numpy as np
import torch

from linexport.parity.cases import Case, draw_inputs
from linexport.parity.check import ModelUnderTest
from linexport.parity.compare import Comparison, compare_arrays, compare_rows, rows_off
from linexport.parity.noise.float32_error import apart_by_row
from linexport.parity.noise.random_rounding import draw, rounding_of_rows
from linexport.parity.reference.module import Reference, feeds, run_deciding
from linexport.parity.routing.choices import RecordingSession, recording, run_with
from linexport.parity.routing.near_ties import run_alike, within_rounding
from linexport.parity.tolerances import Tolerance

log = logging.getLogger(__name__)

Arrays = Mapping[str, np.ndarray]

Again = Callable[[RecordingSession], object]
"""Makes the second run again, on a session that records what it chooses."""

Part = Callable[[Arrays], Arrays]
"""Gives a part of the outputs of a run, by name."""


def compare_runs(
    tested: ModelUnderTest,
    case: Case,
    first: Arrays,
    second: Arrays,
    again: Again,
    by: ModelUnderTest | None = None,
    rounding: Mapping[str, float] = MappingProxyType({}),
    of: Part = dict,
) -> dict[str, Comparison]:
    """Compare outputs and states of two runs of the artifact.

    Args:
        tested: the converted model, which made the first run, in one call.
        case: what was run.
        first: values by name; all of them are compared.
        second: those of the other run.
        again: makes the other run again.
        by: the model that made it; None for the same.
        rounding: of the original in other cases, by output, allowed for at once.
        of: gives the part of a run's outputs that both runs have.
    """
    found = _compare(tested, first, second, rounding)
    if not _passed(found):
        decided = _with_choices(tested, case, again, by or tested)
        first = first if decided is None else {name: of(decided)[name] for name in first}
        found = _compare(tested, first, second, rounding)
    # What is off by more than rounding may excuse fails, however long that is looked at.
    worst = max((r.max_relative_error for r in found.values() if not r.passed), default=0.0)
    if not _passed(found) and worst <= tested.tolerance.most:
        found |= _with_own_rounding(tested, case, first, second, of)
    return found


def _passed(found: Mapping[str, Comparison]) -> bool:
    return all(result.passed for result in found.values())


def _compare(
    tested: ModelUnderTest, first: Arrays, second: Arrays, rounding: Mapping[str, float]
) -> dict[str, Comparison]:
    return {
        name: compare_arrays(value, second[name], tested.tolerance, rounding.get(name, 0.0))
        for name, value in first.items()
    }


def _with_choices(
    tested: ModelUnderTest, case: Case, again: Again, by: ModelUnderTest
) -> Arrays | None:
    """Run as in the first run with the choices of the second; None where one is not near."""
    own, other = recording(tested.open_changed), recording(by.open_changed)
    if own is None or other is None or tested.open_changed is None or tested.tolerance.is_half:
        return None
    batch = tested.batch(case.sizes)
    drawn = draw_inputs(tested.loaded, tested.input_shapes, case)
    inputs = {**feeds(drawn, tested.input_names), **tested.initial_state(batch)}
    try:
        own.run(inputs)
        again(other)
        here, there = own.choices(batch), other.choices(batch)
        taken = {n: there[n].reshape(x.shape) for n, x in here.items() if n in there}
        outputs, made = run_with(tested.open_changed, inputs, taken)
    except Exception as error:  # ONNX Runtime has no class for its own
        log.info("the artifact cannot be run with the choices of another run: %s", error)
        return None
    ties = within_rounding([made], tested.tolerance)
    log.info("two runs differ in %s", ties or "choices by scores that are not near")
    return outputs if ties else None


def _with_own_rounding(
    tested: ModelUnderTest, case: Case, first: Arrays, second: Arrays, of: Part
) -> dict[str, Comparison]:
    """Compare outputs with what rounding does to each row of them; empty if that is unknown."""
    inputs = draw_inputs(tested.loaded, tested.input_shapes, case)
    try:
        originals = [Reference(tested.loaded, kind) for kind in (torch.float32, torch.float64)]
        narrow, wide = (partial(run_deciding, original, inputs) for original in originals)
        alike = run_alike(narrow, wide, tested.tolerance)
        named = [
            of(dict(zip(tested.output_names, outputs, strict=True)))
            for outputs in (
                alike.single or originals[0](inputs),
                alike.double or originals[1](inputs),
            )
        ]
    except Exception:  # not every original can be run in float64
        return {}
    seeded = cache(partial(draw, wide, "float32"))  # None of an original that makes choices

    def drawn(name: str, seed: int) -> np.ndarray | None:
        outputs = seeded(seed)
        if outputs is None:
            return None
        return of(dict(zip(tested.output_names, outputs, strict=True)))[name]

    return {
        name: _by_row(
            tested.tolerance,
            (first[name], second[name]),
            (named[0][name], named[1][name]),
            partial(drawn, name),
        )
        for name in tested.output_names
        if first[name].shape == second[name].shape
    }


def _by_row(
    tolerance: Tolerance,
    runs: tuple[np.ndarray, np.ndarray],
    original: tuple[np.ndarray, np.ndarray],
    drawn: Callable[[int], np.ndarray | None],
) -> Comparison:
    """Compare an output of two runs.

    Args:
        tolerance: of the artifact.
        runs: what is compared.
        original: the same output of the original in float32 and in float64.
        drawn: gives it with random roundings, by a seed.
    """
    first, second, single, exact = map(np.atleast_1d, (*runs, *original))
    known = apart_by_row(single, exact)
    lost = float(known.max(initial=0.0))

    def off(moved: np.ndarray) -> np.ndarray:
        return rows_off(first, second, tolerance, tolerance.beside(moved, lost))

    moved = rounding_of_rows(known, exact, drawn, off)
    return compare_rows(first, second, tolerance, tolerance.beside(moved, lost))
