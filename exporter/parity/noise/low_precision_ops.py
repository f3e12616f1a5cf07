"""The original with operators as coarse as those of ONNX Runtime on a CPU.

    sigmoid(-17) = 4.1e-8        ONNX Runtime: 8.9e-8
    sigmoid(-18) = 1.5e-8        ONNX Runtime: 0
    cumsum                       torch adds in float64 and rounds once; ONNX Runtime in float32

Behind inputs a hundred times too large, gates such as SiLU are so small that a norm after them
makes large numbers of that difference, and angles that were added up are thousands of turns, of
which a cosine sees the rounding: in every ONNX file of the model, whatever its attention is.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linexport.parity.cases import Case
from linexport.parity.compare import largest
from linexport.parity.noise.float32_error import apart
from linexport.parity.reference.module import Arguments, Reference
from linexport.parity.tolerances import MAX_EXCUSED_SHARE, ROUNDING, Tolerance
from linexport.system.torch_internals.operators import OperatorMode
from linexport.system.untyped import Keywords, Positional, TorchCallable

STEP = 2.0**-23
"""Distance of the numbers that sigmoids are rounded to: half of it is the error of the kernel."""


def lost_to_operators(
    reference: Reference, inputs: Arguments, exact: list[np.ndarray]
) -> list[float]:
    """Return how far each output of the original is from ``exact`` with such operators."""
    with _Coarse():
        found = reference(inputs)
    return [apart(a, b) for a, b in zip(found, exact, strict=True)]


def notes(
    lost: list[float], exact: list[np.ndarray], case: Case, tolerance: Tolerance
) -> list[str]:
    """Return the note on outputs that such operators change by more than the tolerance."""
    pairs = [(a, largest(b)) for a, b in zip(lost, exact, strict=True)]
    shares = [a / b for a, b in pairs if b and ROUNDING * a > tolerance.limit(b)]
    if not shares:
        return []
    return [
        f"On the {case.name} inputs at {case.at} the original with sigmoids and "
        f"cumulative sums as coarse as ONNX Runtime's is {max(shares):.0e} of its largest value "
        "away, as any ONNX file of it is: "
        + (
            "there nothing is compared."
            if ROUNDING * max(shares) > MAX_EXCUSED_SHARE
            else f"the artifact may be off by {ROUNDING:g} times that."
        )
    ]


class _Coarse(OperatorMode):
    """Rounds what sigmoids give to multiples of ``STEP``, and cumulative sums at every step."""

    def __torch_dispatch__(
        self,
        func: TorchCallable,
        types: object,
        args: Positional = (),
        kwargs: Keywords | None = None,
    ) -> object:
        """``func``, coarse where it is one of ``COARSE``."""
        return COARSE.get(func, func)(*args, **(kwargs or {}))


def _sigmoid(x: Tensor) -> Tensor:
    return (torch.sigmoid(x) / STEP).round() * STEP


def _silu(x: Tensor) -> Tensor:
    return x * _sigmoid(x)


def _cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    return torch.stack([*accumulate(x.to(dtype or x.dtype).unbind(dim))], dim)


COARSE: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.sigmoid.default: _sigmoid,
    torch.ops.aten.silu.default: _silu,
    torch.ops.aten.cumsum.default: _cumsum,
}
