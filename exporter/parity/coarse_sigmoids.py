"""The original with sigmoids as coarse as those of ONNX Runtime on a CPU.

    sigmoid(-17) = 4.1e-8        ONNX Runtime: 8.9e-8
    sigmoid(-18) = 1.5e-8        ONNX Runtime: 0

Its kernel is right to 6e-8 of 1, not of the result. Behind inputs a hundred times too large, gates
such as SiLU are so small that a norm after them makes large numbers of that difference: in every
ONNX file of the model, however its attention is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from linexport.parity.cases import Case
from linexport.parity.compare import largest
from linexport.parity.reference import Arguments, Reference
from linexport.parity.rounding import apart
from linexport.parity.tolerances import MOST, ROUNDING, Tolerance

STEP = 2.0**-23
"""Distance of the numbers that sigmoids are rounded to: half of it is the error of the kernel."""


def lost_to_sigmoids(
    reference: Reference, inputs: Arguments, exact: list[np.ndarray]
) -> list[float]:
    """Return how far each output of the original is from ``exact`` with such sigmoids."""
    with _Coarse():
        found = reference(inputs)
    return [apart(a, b) for a, b in zip(found, exact, strict=True)]


def notes(
    lost: list[float], exact: list[np.ndarray], case: Case, tolerance: Tolerance
) -> list[str]:
    """Return the note on outputs that such sigmoids change by more than the tolerance."""
    pairs = [(a, largest(b)) for a, b in zip(lost, exact, strict=True)]
    shares = [a / b for a, b in pairs if b and ROUNDING * a > tolerance.limit(b)]
    if not shares:
        return []
    return [
        f"On the {case.name} inputs of {dict(case.sizes)} the original with sigmoids as coarse as "
        f"ONNX Runtime's, which are 6e-8 off, is {max(shares):.0e} of its largest value away, as "
        "any ONNX file of it is: "
        + (
            "there nothing is compared."
            if ROUNDING * max(shares) > MOST
            else f"the artifact may be off by {ROUNDING:g} times that."
        )
    ]


class _Coarse(TorchDispatchMode):
    """Rounds what sigmoids give to multiples of ``STEP``."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """``func`` with coarse results where it is a sigmoid."""
        return COARSE.get(func, func)(*args, **(kwargs or {}))


def _sigmoid(x: Tensor) -> Tensor:
    return (torch.sigmoid(x) / STEP).round() * STEP


def _silu(x: Tensor) -> Tensor:
    return x * _sigmoid(x)


COARSE: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.sigmoid.default: _sigmoid,
    torch.ops.aten.silu.default: _silu,
}
