"""favor+ of a flatter softmax, and one constant feature: as sharp as its noise allows.

    phi(x) = [favor+ of x sqrt(s), M - 1 features, sqrt(c)]        kernel = exp(s q.k/sqrt(d)) + c

Where the error of favor+ is not small compared with the variation of its kernel, a few keys win by
chance and the output is far worse than a mean of the values. The error grows as exp(|q^+k^|^2) and
falls fast with s; the constant draws what noise is left towards the mean. With K the target kernel,
exp(q.k/sqrt(d)), K_s the one estimated, mean, var and cov over pairs of a query and a key, and E_s
the mean of favor+'s own error formula, the nearest estimate in mean square up to a factor has

    c = mean(K) (var(K_s) + E_s) / cov(K, K_s) - mean(K_s)

and s the one of least error. ``fit`` sets both from samples. Implementations that add a small
number to each feature do something like c, with one that no one chose, and nothing like s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from linexport.errors import UsageError
from linexport.models.config import bounded
from linexport.models.feature_maps import draws
from linexport.models.feature_maps.base import MOST_FEATURES, UNBIASED, Array, ExponentialMap
from linexport.models.feature_maps.favor import Favor
from linexport.models.feature_maps.projected import ProjectionOptions
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter

PAIRS = 4096
SHARPNESS = np.geomspace(1, 2**-8, 49)
"""Values of s that a fit tries."""

_LEAST, _MOST = 1e-6, 1e12
"""Bounds of a c that is fitted: no constant, and a mean, in all but name."""


@dataclass(frozen=True, kw_only=True)
class FavorFlatOptions:
    """Options of ``favor+flat``.

    Attributes:
        features: M, at least 2: those of favor+ and the constant one.
        sharpness: s; that of softmax is 1.
        floor: c.
        seed: of the draws.
        orthogonal: w_j orthogonal in blocks of d.
    """

    features: int = bounded(128, at_least=2, at_most=MOST_FEATURES)
    sharpness: float = bounded(1.0, at_least=1e-6, at_most=10.0)
    floor: float = bounded(1.0, above=0, at_most=1e30)
    seed: int = bounded(0, at_least=0)
    orthogonal: bool = True


class FavorFlat(ExponentialMap):
    """Feature map ``favor+flat``: ``favor+`` of a flatter softmax, and a constant feature."""

    kind = "favor+flat"
    kernel = "exp(s q.k/sqrt(d)) + c"
    exactness = UNBIASED
    error = "that of favor+ with M - 1 features, of q sqrt(s) and k sqrt(s)"
    regime = (
        "Instead of favor+ where it is noisy, s and c fitted to samples: better than a mean, too."
    )
    failure = (
        "Where favor+ is hopeless it is nearly a mean of the values, and looks stable being one."
    )
    Options = FavorFlatOptions

    def __init__(self, head_dim: int, options: FavorFlatOptions | None = None) -> None:
        super().__init__(head_dim, options)
        chosen = self.options
        inner = ProjectionOptions(
            features=chosen.features - 1, seed=chosen.seed, orthogonal=chosen.orthogonal
        )
        self.projection: Tensor
        self.root_sharpness: Tensor
        self.half_log_floor: Tensor
        self.register_buffer("projection", Favor(head_dim, inner).projection)
        for name, value in self._constants(chosen.sharpness, chosen.floor).items():
            made = draws.frozen(partial(np.array, [value]), (1,), torch.float32)
            self.register_buffer(name, made)

    @staticmethod
    def _constants(sharpness: float, floor: float) -> dict[str, float]:
        return {"root_sharpness": math.sqrt(sharpness), "half_log_floor": math.log(floor) / 2}

    def fit(self, queries: Array, keys: Array) -> None:
        """Choose s and c.

        Args:
            queries: (n, d) samples of the real distribution, as they reach the map.
            keys: (n', d), likewise.

        Raises:
            UsageError: no samples, or of another width, or not finite.
        """
        for name, rows in (("queries", queries), ("keys", keys)):
            fits = rows.ndim == 2 and len(rows) and rows.shape[1] == self.head_dim
            if not fits or not np.isfinite(rows).all():
                raise UsageError(
                    f"{name} has shape {rows.shape}; expected (n, {self.head_dim}), at least one "
                    "row, all finite."
                )
        rng = draws.generator(self.options.seed)
        q, k = (np.asarray(x)[rng.integers(len(x), size=PAIRS)] for x in (queries, keys))
        with np.errstate(over="ignore", invalid="ignore"):
            tried = [self._flattened(float(sharpness), q, k) for sharpness in SHARPNESS]
        _, sharpness, floor = min(tried)
        for name, value in self._constants(sharpness, floor).items():
            getattr(self, name).fill_(value)

    def _flattened(self, sharpness: float, q: Array, k: Array) -> tuple[float, float, float]:
        """The mean square error, relative to K's variance, of this s with its best c; s; c."""
        scores = (q * k).sum(-1) / math.sqrt(self.head_dim)
        # Relative to the largest: a kernel may be too large for float64, its shape is not.
        target = np.exp(scores - scores.max())
        estimated = np.exp(sharpness * scores)
        noise = self._error(sharpness, q, k).mean()
        spread = estimated.var() + noise
        covariance = ((target - target.mean()) * (estimated - estimated.mean())).mean()
        floor = target.mean() * spread / max(covariance, 1e-300) - estimated.mean()
        floor = float(np.clip(np.nan_to_num(floor, nan=_MOST), _LEAST, _MOST))
        factor = target.mean() / (estimated.mean() + floor)
        error = (factor**2 * spread - 2 * factor * covariance) / max(target.var(), 1e-300)
        return float(np.nan_to_num(error, nan=np.inf)), sharpness, floor

    def frozen(self) -> Sequence[Tensor]:
        return self.projection, self.root_sharpness, self.half_log_floor

    @classmethod
    def feature_count(cls, width: int, *shapes: tuple[int, ...]) -> int:
        return shapes[0][1] + 1

    @classmethod
    def log_phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        w, root, half = frozen
        constant = half.to(x.dtype).expand(*x.shape[:-1], 1)
        return torch.cat([Favor.log_phi(x * root.to(x.dtype), w), constant], -1)

    @classmethod
    def log_phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        w, root, half = parameters
        leading = b.Shape(x, end=-1)
        constant = b.Expand(half.name, b.Concat(leading, b.const([1]), axis=0))
        flat = Favor.log_phi_onnx(b, b.Mul(x, root.name), width, w)
        return str(b.Concat(flat, constant, axis=-1))

    def _sharpness(self) -> float:
        return float(self.root_sharpness.double() ** 2)

    def kernel_value(self, query: Array, key: Array) -> Array:
        floor = math.exp(2 * float(self.half_log_floor.double()))
        scores = (query * key).sum(-1) / np.sqrt(self.head_dim)
        return np.asarray(np.exp(self._sharpness() * scores) + floor)

    def theoretical_error(self, query: Array, key: Array) -> Array:
        return self._error(self._sharpness(), query, key)

    def _error(self, sharpness: float, query: Array, key: Array) -> Array:
        root, rows = math.sqrt(sharpness), self.options.orthogonal
        return Favor.error_of(root * query, root * key, self.features - 1, rows)
