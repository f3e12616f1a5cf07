"""favor+ with one constant feature: noisy scores drawn towards attending to all keys alike.

    phi(x) = [favor+ of M - 1 features, sqrt(c)]        kernel = exp(q.k/sqrt(d)) + c

Where the error of favor+ is not small beside the variation of its kernel, a few keys win by chance
and the output is far worse than a plain mean. Of all c + kernel estimate, the one that comes
nearest to the kernel in mean square, up to a factor, has

    c = mean(kernel) E(error) / var(kernel)

with mean and variance over pairs of a query and a key, and favor+'s own error formula.
``fit`` sets it from samples. Implementations that add a small number to each feature do the same
with a c that no one chose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from linexport.errors import UsageError
from linexport.models.feature_maps import draws
from linexport.models.feature_maps.base import UNBIASED, Array, ExponentialMap
from linexport.models.feature_maps.favor import Favor, FavorOptions
from linexport.models.options import bounded
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter

PAIRS = 4096
_MOST = 1e12
"""Largest c that is fitted: a mean in all but name, and still exact in float32 exponents."""


@dataclass(frozen=True, kw_only=True)
class FavorFloorOptions:
    """Attributes:
    features: M, at least 2: those of favor+ and the constant one.
    floor: c.
    seed: of the draws.
    orthogonal: w_j orthogonal in blocks of d.
    """

    features: int = bounded(128, at_least=2)
    floor: float = bounded(1.0, above=0)
    seed: int = bounded(0, at_least=0)
    orthogonal: bool = True


class FavorFloor(ExponentialMap):
    kind = "favor+floor"
    kernel = "exp(q.k/sqrt(d)) + c"
    exactness = UNBIASED
    error = "that of favor+ with M - 1 features"
    regime = (
        "Instead of favor+ where it is noisy, c fitted to samples: never much worse than a mean."
    )
    failure = "Where favor+ is hopeless it is a mean of the values, and looks stable being one."
    Options = FavorFloorOptions

    def __init__(self, head_dim: int, options: FavorFloorOptions | None = None) -> None:
        super().__init__(head_dim, options)
        chosen = self.options
        inner = FavorOptions(
            features=chosen.features - 1, seed=chosen.seed, orthogonal=chosen.orthogonal
        )
        self.projection: Tensor
        self.half_log_floor: Tensor
        self.register_buffer("projection", Favor(head_dim, inner).projection)
        half = np.array([math.log(chosen.floor) / 2])
        self.register_buffer("half_log_floor", draws.frozen(lambda: half, (1,), torch.float32))

    def fit(self, queries: Array, keys: Array) -> None:
        """Choose c.

        Args:
            queries: (n, d) samples of the real distribution, as they reach the map.
            keys: (n', d), likewise.

        Raises:
            UsageError: samples of another width, or not finite.
        """
        for name, rows in (("queries", queries), ("keys", keys)):
            if rows.ndim != 2 or rows.shape[1] != self.head_dim or not np.isfinite(rows).all():
                raise UsageError(
                    f"{name} has shape {rows.shape}; expected (n, {self.head_dim}), all finite."
                )
        rng = draws.generator(self.options.seed)
        q, k = (np.asarray(x)[rng.integers(len(x), size=PAIRS)] for x in (queries, keys))
        with np.errstate(over="ignore", invalid="ignore"):
            kernel = np.exp((q * k).sum(-1) / math.sqrt(self.head_dim))
            c = kernel.mean() * self.theoretical_error(q, k).mean() / max(kernel.var(), 1e-300)
        c = float(np.clip(np.nan_to_num(c, nan=_MOST), 1e-6, _MOST))
        self.half_log_floor.fill_(math.log(c) / 2)

    def frozen(self) -> Sequence[Tensor]:
        return self.projection, self.half_log_floor

    @classmethod
    def feature_count(cls, width: int, *shapes: tuple[int, ...]) -> int:
        return shapes[0][1] + 1

    @classmethod
    def log_phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        w, half = frozen
        constant = half.to(x.dtype).expand(*x.shape[:-1], 1)
        return torch.cat([Favor.log_phi(x, w), constant], -1)

    @classmethod
    def log_phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        w, half = parameters
        leading = b.Shape(x, end=-1)
        constant = b.Expand(half.name, b.Concat(leading, b.const([1]), axis=0))
        return str(b.Concat(Favor.log_phi_onnx(b, x, width, w), constant, axis=-1))

    def kernel_value(self, query: Array, key: Array) -> Array:
        floor = math.exp(2 * float(self.half_log_floor.double()))
        return np.asarray(np.exp((query * key).sum(-1) / np.sqrt(self.head_dim)) + floor)

    def theoretical_error(self, query: Array, key: Array) -> Array:
        q, k = (x / self.head_dim**0.25 for x in (query, key))
        spread = np.expm1(((q + k) ** 2).sum(-1))
        return np.asarray(spread * np.exp(2 * (q * k).sum(-1)) / (self.features - 1))
