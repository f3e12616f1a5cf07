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
    run = _CaseRun(references, case, inputs, tolerance, notes)
    found = run.in_each_precision(patience)
    for last in found[-1:]:
        notes.extend(_not_finite(last, case))
    scaled = case.magnitude not in (0, 1) and not any(a.vanished for a in found)
    reason = run.why_not_compared(found) if scaled else None
    if reason is not None:
        notes.append(reason)
        return []
    if not len(found) == len(references) == 2:
        return found
    single, double = found
    if _infinite(single) > _infinite(double):
        return run.overflowing(single, double, scaled)
    return run.rounded(single, double, scaled)


@dataclass(frozen=True)
class _CaseRun:
    """The original on the inputs of one case; attributes are the arguments of ``run_reference``."""

    references: list[Reference]
    case: Case
    inputs: Arguments
    tolerance: Tolerance
    notes: list[str]

    def in_each_precision(self, patience: float) -> list[ReferenceOutput]:
        """Run the original in each precision that it can be run in within the patience."""
        found: list[ReferenceOutput] = []
        seconds, case = 0.0, self.case
        for reference in list(self.references):
            finite = not any(_infinite(a) for a in found)
            if found and finite and reference.dtype == torch.float64 and seconds > patience:
                self.notes.append(
                    f"The original takes {seconds:.0f} s in float32 at {case.at}: there it is "
                    "not run in float64 as well."
                )
                continue
            start = time.perf_counter()
            try:
                outputs = reference(self.inputs)
            except Exception as error:
                self.notes.append(
                    f"The original itself fails in {reference.name} at {case.at}: "
                    f"{said_where(error)}"
                )
                if reference.dtype == torch.float64 and found:
                    self.references.remove(reference)
                continue
            seconds = time.perf_counter() - start
            none = [0.0] * len(outputs)
            found.append(ReferenceOutput(reference.name, outputs, none, reference.denominator))
        return found

    def why_not_compared(self, found: list[ReferenceOutput]) -> str | None:
        """Return why nothing is compared on large or tiny inputs; None where something is."""
        at = f"on the {self.case.name} inputs at {self.case.at}: there nothing is compared."
        if found and len(self.references) == 1:
            return f"Without float64 nobody knows what the original loses to rounding {at}"
        dtype = self.tolerance.dtype
        if not self.tolerance.whole and any(_infinite(a) for a in found):
            return f"The original overflows in {dtype}, in which it computes a part, {at}"
        return None

    def overflowing(
        self, single: ReferenceOutput, double: ReferenceOutput, scaled: bool
    ) -> list[ReferenceOutput]:
        """Return float64 alone, where float32 has more values that are not finite."""
        self.notes.append(
            f"The original overflows in float32 on the {self.case.name} inputs at {self.case.at} "
            f"({_infinite(single)} values, {_infinite(double)} of them in float64 as well): there "
            f"{'nothing is compared' if scaled else 'it is compared in float64 only'}."
        )
        return [] if scaled else [replace(double, overflows=True)]

    def rounded(
        self, single: ReferenceOutput, double: ReferenceOutput, scaled: bool
    ) -> list[ReferenceOutput]:
        """Return both precisions with what float32 loses to rounding, as far as they tell."""
        case, tolerance = self.case, self.tolerance
        double = self._with_choices_of_float32(single, double)
        rounding = _roundings(single, double)
        for distance, output in zip(rounding, double.outputs, strict=True):
            lost = note(distance, output, case, tolerance)
            if lost is not None:
                self.notes.append(lost)
            if is_nothing_else(distance, output, case):
                return []
        found = [single, double]
        if not tolerance.is_half and any(
            is_mostly_rounding(distance, output, tolerance.most)
            for distance, output in zip(rounding, double.outputs, strict=True)
        ):
            found = [double]  # float32 says nothing of the artifact, float64 does
        # NaN in both precisions is what a quotient of zeros makes: a number in its place is no
        # error.
        undefined = scaled and _infinite(double) > 0 and not any(map(_has_infinity, found))
        return [replace(output, rounding=rounding, overflows=undefined) for output in found]

    def _with_choices_of_float32(
        self, single: ReferenceOutput, double: ReferenceOutput
    ) -> ReferenceOutput:
        """Return float64 with the choices of float32, where they differ and rounding decides."""
        pairs = zip(_roundings(single, double), double.outputs, strict=True)
        if not any(note(x, y, self.case, self.tolerance) for x, y in pairs):
            return double
        narrow, wide = (partial(run_deciding, one, self.inputs) for one in self.references)
        alike = run_alike(narrow, wide, self.tolerance).double
        return replace(double, outputs=alike or double.outputs)


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
