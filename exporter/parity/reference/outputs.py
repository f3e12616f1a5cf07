"""The original's outputs on the inputs of a case, and how far its own rounding goes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from linexport.parity.cases import Case
from linexport.parity.noise.float32_error import apart, is_mostly_rounding, is_nothing_else, note
from linexport.parity.reference.module import Arguments, Reference, run_deciding
from linexport.parity.routing.near_ties import run_alike
from linexport.parity.tolerances import Tolerance
from linexport.sources.first_run import said_where

PATIENCE = 2.0
"""Seconds in float32 above which float64, which takes two or three times that, is left out at
first: a case that then fails is compared in both."""

VANISHED = (
    "NaN or infinite, as a denominator of linear attention is 0 or not finite: give it an eps > 0, "
    "or a feature map whose kernel is positive"
)


@dataclass(frozen=True)
class ReferenceOutput:
    """The original in one precision.

    Attributes:
        name: the precision.
        outputs: in order.
        rounding: per output, how far float32 is from float64; 0 where one of them is missing.
        denominator: smallest |denominator| on the way, see ``Reference``.
        overflows: values that are not finite are so because they left the precision, or are NaN
            of large or tiny inputs.
        tolerance: what is allowed beside it, where that is not what is allowed of the artifact.
    """

    name: str
    outputs: list[np.ndarray]
    rounding: list[float]
    denominator: float | None
    overflows: bool = False
    tolerance: Tolerance | None = None

    @property
    def vanished(self) -> bool:
        """A denominator was 0 or not finite."""
        return self.denominator is not None and not 0 < self.denominator < math.inf


def run_reference(
    references: list[Reference],
    case: Case,
    inputs: Arguments,
    tolerance: Tolerance,
    notes: list[str],
    patience: float = PATIENCE,
) -> list[ReferenceOutput]:
    """The original in each precision that can be compared with; what is wrong with it in notes.

    A float64 reference that fails is dropped from ``references``; one that would take long is left
    out, so that a finite float32 one alone is compared with, and no rounding is allowed for. Where
    float32 overflows or is mostly rounding, float64 alone is compared with; where that overflows
    too, at fewer values, an artifact that does not is not compared at them; neither is one that
    gives numbers where the original gives NaN in both, on large or tiny inputs. Of large
    or tiny inputs nothing is returned where the original overflows, is mostly rounding, or cannot
    be run in float64 to find out; except where denominators vanish. Where float64 differs, it makes
    the choices of float32 if rounding decides them, see ``linexport.parity.routing.near_ties``.
    """
    found: list[ReferenceOutput] = []
    seconds = 0.0
    for reference in list(references):
        finite = not any(_infinite(a) for a in found)
        if found and finite and reference.dtype == torch.float64 and seconds > patience:
            notes.append(
                f"The original takes {seconds:.0f} s in float32 at {case.at}: there it is "
                "not run in float64 as well."
            )
            continue
        start = time.perf_counter()
        try:
            outputs = reference(inputs)
        except Exception as error:
            text = (
                f"The original itself fails in {reference.name} at {case.at}: {said_where(error)}"
            )
            notes.append(text)
            if reference.dtype == torch.float64 and found:
                references.remove(reference)
            continue
        seconds = time.perf_counter() - start
        none = [0.0] * len(outputs)
        found.append(ReferenceOutput(reference.name, outputs, none, reference.denominator))
    for last in found[-1:]:
        notes.extend(_not_finite(last, case))
    scaled = case.magnitude not in (0, 1) and not any(a.vanished for a in found)
    if scaled and found and len(references) == 1:
        notes.append(
            f"Without float64 nobody knows what the original loses to rounding on the {case.name} "
            f"inputs at {case.at}: there nothing is compared."
        )
        return []
    if scaled and not tolerance.whole and any(_infinite(a) for a in found):
        notes.append(
            f"The original overflows in {tolerance.dtype}, in which it computes a part, on the "
            f"{case.name} inputs at {case.at}: there nothing is compared."
        )
        return []
    if not len(found) == len(references) == 2:
        return found
    single, double = map(_infinite, found)
    if single > double:
        notes.append(
            f"The original overflows in float32 on the {case.name} inputs at {case.at} "
            f"({single} values, {double} of them in float64 as well): there "
            f"{'nothing is compared' if scaled else 'it is compared in float64 only'}."
        )
        return [] if scaled else [replace(found[1], overflows=True)]
    rounding = _roundings(*found)
    if any(note(x, y, case, tolerance) for x, y in zip(rounding, found[1].outputs, strict=True)):
        narrow, wide = (partial(run_deciding, reference, inputs) for reference in references)
        alike = run_alike(narrow, wide, tolerance).double
        found[1] = replace(found[1], outputs=alike or found[1].outputs)
        rounding = _roundings(*found)
    for distance, output in zip(rounding, found[1].outputs, strict=True):
        lost = note(distance, output, case, tolerance)
        if lost is not None:
            notes.append(lost)
        if is_nothing_else(distance, output, case):
            return []
    if not tolerance.is_half and any(
        is_mostly_rounding(distance, output, tolerance.most)
        for distance, output in zip(rounding, found[1].outputs, strict=True)
    ):
        found = found[1:]  # float32 says nothing of the artifact, float64 does
    # NaN in both precisions is what a quotient of zeros makes: a number in its place is no error.
    undefined = scaled and _infinite(found[-1]) > 0 and not any(map(_has_infinity, found))
    return [replace(output, rounding=rounding, overflows=undefined) for output in found]


def _roundings(single: ReferenceOutput, double: ReferenceOutput) -> list[float]:
    return [apart(a, b) for a, b in zip(single.outputs, double.outputs, strict=True)]


def _infinite(output: ReferenceOutput) -> int:
    """Return the number of values that are NaN or infinite."""
    return sum(int((~np.isfinite(x)).sum()) for x in output.outputs)


def _has_infinity(output: ReferenceOutput) -> bool:
    return any(np.isinf(x).any() for x in output.outputs if x.dtype.kind == "f")


def _not_finite(output: ReferenceOutput, case: Case) -> list[str]:
    nan, infinite = (
        sum(int(test(x).sum()) for x in output.outputs if x.dtype.kind == "f")
        for test in (np.isnan, np.isinf)
    )
    if not nan + infinite:
        return []
    return [
        f"The original itself gives {nan} NaN and {infinite} infinite values in {output.name} on "
        f"the {case.name} inputs at {case.at}."
    ]
