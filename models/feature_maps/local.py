"""A mask of nearness: 1 for keys in the L1 ball around the query, smoothed at its edge.

    phi_q(x) = sqrt(c/m) [cos w_j.x, sin w_j.x]                     w_j ~ N(0, I / tau^2)
    phi_k(y) = sqrt(c/m) [cos w_j.(y + r_j), sin w_j.(y + r_j)]     r_j uniform in |r|_1 <= delta
    c = vol(B) (2 pi tau^2)^(-d/2)                                  vol(B) = (2 delta)^d / d!

    E phi_q(x).phi_k(y) = (1_B * N(0, tau^2 I))(x - y) = k_tau(x - y)
    Var = (c^2 (1 + k_{tau/2} / c_{tau/2}) / 2 - k_tau^2) / m

The unsmoothed indicator has no such features: its transform is not integrable, so that it has no
density to draw frequencies from. Source: the random features of Rahimi and Recht 2007, with the
phase of a uniform point of the ball in place of the ball's own transform.

The error grows exponentially with d for a mask as sharp: see ``relative_error``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from linexport.errors import UsageError
from linexport.models.config import bounded
from linexport.models.feature_maps import draws
from linexport.models.feature_maps.base import (
    LARGEST_SCALE,
    LEAST_SCALE,
    MOST_FEATURES,
    UNBIASED,
    Array,
    FeatureMap,
)
from linexport.models.feature_maps.l1_ball import smoothed_indicator, uniform_in_ball, volume
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter

WIDEST = 4
"""Largest head width for which the mask is useful."""

_LEAST = 1e-3
"""Kernel at distance zero below which smoothing leaves nothing of the ball."""


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """Options of ``local``.

    Attributes:
        features: M, even: a cosine and a sine for each w_j.
        delta: radius of the ball.
        tau: standard deviation of the smoothing.
        seed: of the draws.
    """

    features: int = bounded(128, multiple_of=2, at_most=MOST_FEATURES)
    delta: float = bounded(1.0, at_least=LEAST_SCALE, at_most=LARGEST_SCALE)
    tau: float = bounded(0.25, at_least=LEAST_SCALE, at_most=LARGEST_SCALE)
    seed: int = bounded(0, at_least=0)


class Local(FeatureMap):
    """Warns where d is above 4, with the error to expect.

    Raises:
        UsageError: a ball that the smoothing washes away.
    """

    kind = "local"
    kernel = "P(|q - k + tau g|_1 <= delta), g ~ N(0, I)"
    exactness = UNBIASED
    positive = False
    kernel_positive = False
    error = "(c^2 (1 + k_{tau/2} / c_{tau/2}) / 2 - k_tau^2) / m"
    regime = "A factor that keeps attention local, for d <= 4; alone, uniform attention nearby."
    failure = "Its variance grows exponentially with d, and estimates of 0 can be negative."
    Options = LocalOptions

    def __init__(self, head_dim: int, options: LocalOptions | None = None) -> None:
        super().__init__(head_dim, options)
        _check(head_dim, self.options)
        self.frequencies: Tensor
        self.phases: Tensor
        self.gain: Tensor
        count = self.options.features // 2
        shapes = {"frequencies": (head_dim, count), "phases": (count,), "gain": (1,)}
        drawing = cache(self._draw)
        for name, shape in shapes.items():
            drawn = draws.frozen(partial(_part, drawing, name), shape, torch.float32)
            self.register_buffer(name, drawn)

    def _draw(self) -> dict[str, Array]:
        chosen, count = self.options, self.options.features // 2
        rng = draws.generator(chosen.seed)
        w = rng.standard_normal((self.head_dim, count)) / chosen.tau
        r = uniform_in_ball(rng, count, self.head_dim, chosen.delta)
        gain = math.sqrt(constant(self.head_dim, chosen.delta, chosen.tau) / count)
        return {"frequencies": w, "phases": (w * r).sum(0), "gain": np.array([gain])}

    def frozen(self) -> Sequence[Tensor]:
        return self.frequencies, self.phases, self.gain

    @classmethod
    def feature_count(cls, width: int, *shapes: tuple[int, ...]) -> int:
        return 2 * shapes[0][1]

    @classmethod
    def phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        w, _, gain = frozen
        angle = x @ w.to(x.dtype)
        return torch.cat([angle.cos(), angle.sin()], -1) * gain.to(x.dtype)

    @classmethod
    def phi_key(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        w, phases, gain = frozen
        angle = x @ w.to(x.dtype) + phases.to(x.dtype)
        return torch.cat([angle.cos(), angle.sin()], -1) * gain.to(x.dtype)

    @classmethod
    def phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        w, _, gain = (p.name for p in parameters)
        angle = b.MatMul(x, w)
        return str(b.Mul(b.Concat(b.Cos(angle), b.Sin(angle), axis=-1), gain))

    @classmethod
    def phi_key_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        w, phases, gain = (p.name for p in parameters)
        angle = b.Add(b.MatMul(x, w), phases)
        return str(b.Mul(b.Concat(b.Cos(angle), b.Sin(angle), axis=-1), gain))

    def kernel_value(self, query: Array, key: Array) -> Array:
        return smoothed_indicator(query - key, self.options.delta, self.options.tau)

    def theoretical_error(self, query: Array, key: Array) -> Array:
        d, delta, tau = self.head_dim, self.options.delta, self.options.tau
        c, narrow_c = constant(d, delta, tau), constant(d, delta, tau / 2)
        narrow = smoothed_indicator(query - key, delta, tau / 2)
        square = c**2 * (1 + narrow / narrow_c) / 2
        return np.asarray((square - self.kernel_value(query, key) ** 2) / len(self.phases))

    def relative_error(self) -> float:
        """Standard deviation of the kernel of a query and an equal key, over the kernel."""
        same = np.zeros((1, self.head_dim))
        deviation = np.sqrt(self.theoretical_error(same, same))
        return float((deviation / self.kernel_value(same, same))[0])


def constant(width: int, delta: float, tau: float) -> float:
    """c = vol(B) (2 pi tau^2)^(-d/2)."""
    return volume(width, delta) * (2 * math.pi * tau**2) ** (-width / 2)


def _part(draw: Callable[[], dict[str, Array]], name: str) -> Array:
    return draw()[name]


@cache
def _peak(width: int, delta: float, tau: float) -> float:
    """The kernel at distance zero."""
    return float(smoothed_indicator(np.zeros((1, width)), delta, tau)[0])


def _check(width: int, options: LocalOptions) -> None:
    """Refuse a ball that smoothing removes; warn of the cost of a wide head."""
    delta, tau = options.delta, options.tau
    advice = (
        f"Use heads of at most {WIDEST}, or a map of nearness for any width: 'favor+*gaussian' for "
        "attention, 'laplace' as a factor"
    )
    peak = _peak(width, delta, tau)
    if peak < _LEAST:
        raise UsageError(
            f"Feature map 'local' with d = {width}, delta = {delta:g} and tau = {tau:g}: "
            f"smoothing leaves {peak:.1e} of the mask at distance 0, so that there is none. "
            f"{advice}; or choose tau near {delta / (2 * width):.2g}."
        )
    if width > WIDEST:
        c = constant(width, delta, tau)
        error = c / peak / math.sqrt(options.features)
        warnings.warn(
            f"Feature map 'local' with d = {width}: the kernel of equal query and key is "
            f"{peak:.2g} with a standard deviation of about {error:.1g} times that, and a sharper "
            f"mask costs exponentially more with d. {advice}.",
            stacklevel=4,
        )
