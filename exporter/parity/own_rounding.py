"""The loss of the original itself to the rounding of float32 on one case, output by output.

Where a norm divides by nearly nothing one token in thousands has errors of 5e-5, in the original as
in the artifact. It is measured where two runs of the artifact differ by more than the tolerance.
"""

from __future__ import annotations

import torch

from linexport.parity.cases import Case, draw_inputs
from linexport.parity.check import ModelUnderTest
from linexport.parity.reference import Reference
from linexport.parity.rounding import apart


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
