"""Two runs of an artifact on one case, with what the original itself loses to rounding there.

Where a norm divides by nearly nothing one token in thousands has errors of 5e-5, in the original as
in the artifact; where two scores of a router are nearly the same, rounding takes one expert or the
other. Both are looked at where the runs differ by more than the tolerance.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import numpy as np
import torch

from linexport.parity.cases import Case, draw_inputs
from linexport.parity.check import ModelUnderTest
from linexport.parity.choices import RecordingSession, recording, run_with
from linexport.parity.compare import Comparison, compare_arrays
from linexport.parity.near_ties import run_alike, within_rounding
from linexport.parity.reference import Reference, feeds, run_deciding
from linexport.parity.rounding import apart

log = logging.getLogger(__name__)

Arrays = Mapping[str, np.ndarray]

Again = Callable[[RecordingSession], object]
"""Makes the second run again, on a session that records what it chooses."""


def compare_runs(
    tested: ModelUnderTest,
    case: Case,
    first: Arrays,
    second: Arrays,
    again: Again,
    by: ModelUnderTest | None = None,
    rounding: Mapping[str, float] = MappingProxyType({}),
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
    """
    found = _compare(tested, first, second, rounding)
    if not _passed(found):
        decided = _with_choices(tested, case, again, by or tested)
        first = first if decided is None else {name: decided[name] for name in first}
        found = _compare(tested, first, second, rounding)
    if not _passed(found):
        found = _compare(tested, first, second, own_rounding(tested, case))
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


def own_rounding(tested: ModelUnderTest, case: Case) -> dict[str, float]:
    """Return the distance of the original's float32 from its float64, by output; 0 if unknown."""
    inputs = draw_inputs(tested.loaded, tested.input_shapes, case)
    try:
        originals = [Reference(tested.loaded, kind) for kind in (torch.float32, torch.float64)]
        narrow, wide = (partial(run_deciding, original, inputs) for original in originals)
        double = run_alike(narrow, wide, tested.tolerance)
        single, double = originals[0](inputs), double or originals[1](inputs)
    except Exception:  # not every original can be run in float64
        return dict.fromkeys(tested.output_names, 0.0)
    return {
        name: apart(a, b) for name, a, b in zip(tested.output_names, single, double, strict=True)
    }
