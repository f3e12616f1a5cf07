"""The activations f of y = f(W x + b), and what docs/math.md, "Feed-forward layers", needs of each.

Bernstein:  max|f''|, and the jump of f' where f has a kink
Taylor:     f(t) = linear t + sum_k c_k t^(first + 2k)    for |t| < radius
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linexport.errors import UsageError
from linexport.models.config import did_you_mean
from linexport.models.feature_maps.base import Array
from linexport.models.feed_forward import series


@dataclass(frozen=True)
class Activation:
    """One activation.

    Attributes:
        name: what users choose it by.
        function: f, elementwise, of any float type.
        curvature: max|f''| where f'' exists.
        kink: sum of the jumps of f'.
        linear: the coefficient of t in the power series; its constant is zero for all of them.
        first: the power of t that the rest of the series begins with, in steps of two.
        terms: ``terms(count)``: the coefficients of the rest; None without a power series.
        radius: of its convergence.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    curvature: float
    kink: float = 0.0
    linear: float = 0.0
    first: int = 2
    terms: Callable[[int], Array] | None = field(default=None, repr=False)
    radius: float = math.inf

    def __call__(self, t: Array) -> Array:
        """f in float64."""
        return self.function(torch.from_numpy(np.ascontiguousarray(t))).numpy()


_ALL = (
    Activation(
        "gelu",
        F.gelu,
        # f''(t) = (2 - t^2) exp(-t^2/2) / sqrt(2 pi), largest at 0. WRONG elsewhere: half of that.
        curvature=2 / math.sqrt(2 * math.pi),
        linear=0.5,
        terms=series.gelu,
    ),
    Activation(
        "gelu-tanh",
        lambda t: F.gelu(t, approximate="tanh"),
        curvature=2 / math.sqrt(2 * math.pi),  # at 0, as of GELU itself
        linear=0.5,
        terms=series.gelu_tanh,
        radius=series.GELU_TANH_RADIUS,
    ),
    Activation(
        "silu",
        F.silu,
        curvature=0.5,  # at 0
        linear=0.5,
        terms=series.silu,
        radius=math.pi,
    ),
    Activation("relu", F.relu, curvature=0.0, kink=1.0),
    Activation(
        "tanh",
        torch.tanh,
        curvature=4 / (3 * math.sqrt(3)),  # where tanh^2 = 1/3
        linear=1.0,
        first=3,
        terms=lambda count: series.tanh(count + 1)[1:],
        radius=math.pi / 2,
    ),
)

ACTIVATIONS = {activation.name: activation for activation in _ALL}
"""By name."""


def find_activation(activation: str | nn.Module) -> Activation:
    """The activation of a name or of a module such as ``nn.GELU()``.

    Raises:
        UsageError: it is none of ``ACTIVATIONS``.
    """
    name = activation if isinstance(activation, str) else _name(activation)
    if name not in ACTIVATIONS:
        raise UsageError(
            f"Unknown activation {name!r}; expected {', '.join(ACTIVATIONS)}."
            f"{did_you_mean(name, ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def known(module: nn.Module) -> bool:
    """The module is one of ``ACTIVATIONS``."""
    return _name(module) in ACTIVATIONS


def _name(module: nn.Module) -> str:
    if isinstance(module, nn.GELU):
        return "gelu" if module.approximate == "none" else "gelu-tanh"
    kinds = {nn.SiLU: "silu", nn.ReLU: "relu", nn.Tanh: "tanh"}
    return kinds.get(type(module), type(module).__name__)
