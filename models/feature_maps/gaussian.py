"""The Gaussian kernel of a bandwidth sigma, which may differ from head to head.

    phi(x) = m^{-1/2} [cos w_j.x / sigma, sin w_j.x / sigma]      w_j ~ N(0, I), M = 2m
    kernel = exp(-|q - k|^2 / (2 sigma^2)) = k
    Var    = (1 - k^2)^2 / M                                      of independent w_j

w_j are independent, or orthogonal in blocks of d. sigma is given, one or one for each head, or
fitted, and sqrt(d) until then. ``fit`` takes the one whose estimates are nearest to softmax's
kernel K in mean square, up to a factor, which attention that normalises does not see. With moments
over pairs of queries and keys, and E the error above,

    sigma = arg max  mean(K k)^2 / (mean(k^2) + mean(E))

Source: Rahimi and Recht 2007; Peng et al. 2021 (arXiv 2103.02143). The spectral density of this
kernel is N(0, I / sigma^2); WRONG elsewhere: N(0, sigma^2 I).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from linexport.errors import UsageError
from linexport.models.config import bounded
from linexport.models.feature_maps import draws, orthogonal
from linexport.models.feature_maps.base import LARGEST_SCALE, LEAST_SCALE, MOST_FEATURES, Array
from linexport.models.feature_maps.fourier import FourierMap, is_cauchy
from linexport.models.feature_maps.projected import mean_square
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.feature_map import Parameter

PAIRS = 4096
BANDWIDTHS = np.geomspace(0.05, 20, 61)
"""Values of sigma that a fit tries, as multiples of the root mean square of |q - k|."""


MOST_HEADS = 65536


@dataclass(frozen=True, kw_only=True)
class GaussianOptions:
    """Options of ``gaussian``.

    Attributes:
        features: M, even: a cosine and a sine for each w_j.
        bandwidth: sigma, or a list of those of each head, which ``fit`` leaves; None: sqrt(d), or
            what ``fit`` finds.
        heads: bandwidths that ``fit`` may set: 1 for all heads together, or the number of heads; of
            a list of bandwidths it is their number.
        seed: of the draws.
        orthogonal: w_j orthogonal in blocks of d.
    """

    features: int = bounded(128, multiple_of=2, at_most=MOST_FEATURES)
    bandwidth: float | list[float] | None = field(
        default=None, metadata={"at_least": LEAST_SCALE, "at_most": LARGEST_SCALE}
    )
    heads: int = bounded(1, at_least=1, at_most=MOST_HEADS)
    seed: int = bounded(0, at_least=0)
    orthogonal: bool = True


class Gaussian(FourierMap):
    """Feature map ``gaussian``: random features of exp(-|q - k|^2 / (2 sigma^2))."""

    kind = "gaussian"
    kernel = "exp(-|q - k|^2 / (2 sigma^2))"
    error = "(1 - k^2)^2 / M for independent w"
    regime = "Attention by distance, sigma given or fitted; bounded features, at any scale."
    failure = "Cannot tell kernels below M^{-1/2} from 0; estimates of them can be negative."
    Options: ClassVar[type[Any]] = GaussianOptions

    def __init__(self, head_dim: int, options: Any = None) -> None:
        super().__init__(head_dim, options)
        chosen = self.options
        self.frequencies: Tensor
        self.inverse_bandwidth: Tensor
        drawn = draws.projection(head_dim, chosen.features // 2, chosen.seed, chosen.orthogonal)
        sigmas = self._bandwidths()
        self.register_buffer("frequencies", drawn / sigmas[0] if len(sigmas) == 1 else drawn)
        shape = (len(sigmas), 1)
        made = draws.frozen(lambda: 1 / np.reshape(sigmas, shape), shape, torch.float32)
        self.register_buffer("inverse_bandwidth", made)

    def _bandwidths(self) -> list[float]:
        """Sigma of each head, before any fit."""
        given, heads = self.options.bandwidth, self.options.heads
        if not isinstance(given, list):
            return [float(self._default() if given is None else given)] * heads
        least, most = LEAST_SCALE, LARGEST_SCALE
        numbers = all(type(x) in (int, float) and least <= x <= most for x in given)
        if not (given and numbers and heads in (1, len(given))):
            expected = "" if heads == 1 else f", {heads:,} of them as 'heads' says"
            raise UsageError(
                f"Feature map {self.kind!r} has the bandwidths {given!r}; expected a number from "
                f"{least:g} to {most:g} for each head{expected}."
            )
        return [float(x) for x in given]

    def _default(self) -> float:
        return math.sqrt(self.head_dim)

    @property
    def heads(self) -> int | None:
        return len(self.inverse_bandwidth) if len(self.inverse_bandwidth) > 1 else None

    def frozen(self) -> Sequence[Tensor]:
        """w_j / sigma; of several heads w_j, and 1 / sigma of each."""
        if self.heads is None:
            return (self.frequencies,)
        return self.frequencies, self.inverse_bandwidth

    @classmethod
    def drawn_like(cls, *frozen: Array) -> bool:
        return not is_cauchy(frozen[0])

    @classmethod
    def phi(cls, x: Tensor, *frozen: Tensor) -> Tensor:
        w, *inverse = frozen
        return super().phi(x * inverse[0].to(x.dtype) if inverse else x, w)

    @classmethod
    def phi_onnx(cls, b: Body, x: str, width: int, *parameters: Parameter) -> str:
        w, *inverse = parameters
        return super().phi_onnx(b, b.Mul(x, inverse[0].name) if inverse else x, width, w)

    def fit(self, queries: Array, keys: Array) -> None:
        """Choose sigma: from (n, d) one for all heads, from (heads, n, d) one for each.

        A given sigma is kept.

        Raises:
            UsageError: no samples, or of another width or number of heads, or not finite.
        """
        heads = len(self.inverse_bandwidth)
        for name, x in (("queries", queries), ("keys", keys)):
            known = x.shape[:-2] in ((), (heads,)) and x.ndim > 1
            if not (known and x.shape[-1] == self.head_dim and x.size and np.isfinite(x).all()):
                raise UsageError(
                    f"{name} has shape {x.shape}; expected (n, {self.head_dim}) or ({heads}, n, "
                    f"{self.head_dim}), at least one row, all finite."
                )
        if self.options.bandwidth is not None:
            return
        rng = draws.generator(self.options.seed)
        parts = (np.broadcast_to(x, (heads, *x.shape[-2:])) for x in (queries, keys))
        found = [self._fitted(q, k, rng) for q, k in zip(*parts, strict=True)]
        inverse = torch.tensor(found, dtype=torch.float32)[:, None]
        if heads == 1:
            self.frequencies.mul_(inverse / self.inverse_bandwidth)
        self.inverse_bandwidth.copy_(inverse)

    def _fitted(self, queries: Array, keys: Array, rng: np.random.Generator) -> float:
        """1 / sigma of one head."""
        q, k = (self._seen(x[rng.integers(len(x), size=PAIRS)]) for x in (queries, keys))
        scores = (q * k).sum(-1) / math.sqrt(self.head_dim)
        target = np.exp(scores - scores.max())
        square = _squared_norm(q - k)
        distance = math.sqrt(square.mean())
        if not distance:
            return 1 / self._default()
        inverses = 1 / (distance * BANDWIDTHS)
        return float(max(inverses, key=lambda inverse: self._fitness(inverse**2 * square, target)))

    def _fitness(self, square: Array, target: Array) -> float:
        """Return the objective of the module's docstring at ``square``, |q - k|^2 / sigma^2."""
        kernel, noise = np.exp(-square / 2), self._error(square)
        return float((target * kernel).mean() ** 2 / ((kernel**2).mean() + noise.mean()))

    @classmethod
    def _seen(cls, x: Array) -> Array:
        """Rows as the kernel sees them."""
        return x

    def _scaled(self, query: Array, key: Array) -> tuple[Array, Array]:
        """Rows (..., d) over sigma; with several heads (..., heads, d)."""
        inverse = self.inverse_bandwidth.double().numpy()
        inverse = inverse if len(inverse) > 1 else inverse[0]
        return inverse * self._seen(query), inverse * self._seen(key)

    def kernel_value(self, query: Array, key: Array) -> Array:
        q, k = self._scaled(query, key)
        return np.asarray(np.exp(-_squared_norm(q - k) / 2))

    def theoretical_error(self, query: Array, key: Array) -> Array:
        q, k = self._scaled(query, key)
        return self._error(_squared_norm(q - k))

    def _error(self, square: Array) -> Array:
        """Return the mean square error of estimates at ``square``, |q - k|^2 / sigma^2."""
        covariance = orthogonal.covariance(-square / 2, self.head_dim)
        return mean_square(
            np.expm1(-square) ** 2 / 2,
            covariance if self.options.orthogonal else None,
            self.features // 2,
            self.head_dim,
        )


def _squared_norm(x: Array) -> Array:
    return np.asarray((x**2).sum(-1))
