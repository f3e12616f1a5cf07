"""Two runs of an artifact on one case, with what the original itself loses to rounding there.

Where a norm divides by nearly nothing one token in thousands has errors of 5e-5, in the original as
in the artifact; where two scores of a router are nearly the same, rounding takes one expert or the
other. Both are measured where the runs differ by more than the tolerance.
"""

from __future__ import annotations

import numpy as np
import torch

from linexport.parity.cases import Case, draw_inputs
from linexport.parity.check import ModelUnderTest
from linexport.parity.compare import Comparison, compare_arrays
from linexport.parity.near_ties import settled
from linexport.parity.reference import Reference
from linexport.parity.rounding import apart


def compare_runs(
    tested: ModelUnderTest,
    case: Case,
    output: str,
    first: np.ndarray,
    second: np.ndarray,
    rounding: float = 0.0,
) -> Comparison:
    """Compare an output of two runs of the artifact.

    Args:
        tested: the converted model.
        case: what was run.
        output: one of the original's.
        first: its values in one run.
        second: in the other.
        rounding: of the original in other cases, allowed for at once.
    """
    result = compare_arrays(first, second, tested.tolerance, rounding)
    if result.passed:
        return result
    rounding = own_rounding(tested, case)[output]
    result = compare_arrays(first, second, tested.tolerance, rounding)
    if result.passed:
        return result
    inputs = draw_inputs(tested.loaded, tested.input_shapes, case)
    original, place = (
        Reference(tested.loaded, torch.float32),
        list(tested.output_names).index(output),
    )
    first = settled(first, second, tested.tolerance, rounding, lambda: original(inputs)[place])
    return compare_arrays(first, second, tested.tolerance, rounding)


def own_rounding(tested: ModelUnderTest, case: Case) -> dict[str, float]:
    """Return the distance of the original's float32 from its float64, by output; 0 if unknown."""
    inputs = draw_inputs(tested.loaded, tested.input_shapes, case)
    try:
        single, double = (
            Reference(tested.loaded, kind)(inputs) for kind in (torch.float32, torch.float64)
        )
    except Exception:  # not every original can be run in float64
        return dict.fromkeys(tested.output_names, 0.0)
    return {
        name: apart(a, b) for name, a, b in zip(tested.output_names, single, double, strict=True)
    }
