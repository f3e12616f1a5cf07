"""Random projections w_j ~ N(0, I), drawn once, and what estimates softmax's kernel by them.

The error of m draws of variance V each, P ordered pairs of which have the covariance C, is

    E (phi(q).phi(k) - kernel)^2 = (V + P C / m) / m

with P = 0 for independent draws; see ``orthogonal`` for blocks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from linexport.models.config import bounded
from linexport.models.feature_maps import draws, orthogonal
from linexport.models.feature_maps.base import MOST_FEATURES, UNBIASED, Array, FeatureMap


@dataclass(frozen=True, kw_only=True)
class ProjectionOptions:
    """Options of a map with one feature for each w_j.

    Attributes:
        features: M.
        seed: of the draws.
        orthogonal: w_j orthogonal in blocks of d.
    """

    features: int = bounded(128, at_least=1, at_most=MOST_FEATURES)
    seed: int = bounded(0, at_least=0)
    orthogonal: bool = True


@dataclass(frozen=True, kw_only=True)
class PairedProjectionOptions(ProjectionOptions):
    """Options of a map with two features for each w_j: M is even."""

    features: int = bounded(128, multiple_of=2, at_most=MOST_FEATURES)


class ProjectedMap(FeatureMap):
    """An estimate of exp(q . k / sqrt(d)) by w_j, the columns of the buffer ``projection``.

    Class attributes:
        features_each: number of features for each w_j.
    """

    kernel = "exp(q.k/sqrt(d))"
    exactness = UNBIASED
    features_each: ClassVar[int] = 1
    Options: ClassVar[type[Any]] = ProjectionOptions

    def __init__(self, head_dim: int, options: Any = None) -> None:
        super().__init__(head_dim, options)
        chosen = self.options
        count = chosen.features // self.features_each
        drawn = draws.projection(head_dim, count, chosen.seed, chosen.orthogonal)
        self.projection: Tensor
        self.register_buffer("projection", drawn)

    def frozen(self) -> Sequence[Tensor]:
        return (self.projection,)

    @classmethod
    def feature_count(cls, width: int, *shapes: tuple[int, ...]) -> int:
        return cls.features_each * shapes[0][1]

    @classmethod
    @abstractmethod
    def variance(cls, query: Array, key: Array) -> Array:
        """V, for rows (n, d) of q^ and k^."""

    @classmethod
    @abstractmethod
    def covariance(cls, query: Array, key: Array) -> Array:
        """C of two draws of one orthogonal block, for rows (n, d) of q^ and k^."""

    @classmethod
    def error_of(cls, query: Array, key: Array, count: int, in_blocks: bool) -> Array:
        """E (phi(q) . phi(k) - kernel)^2 of ``count`` draws, for rows (n, d) of q and k."""
        width = query.shape[-1]
        q, k = (x / width**0.25 for x in (query, key))
        covariance = cls.covariance(q, k) if in_blocks else None
        return mean_square(cls.variance(q, k), covariance, count, width)

    def theoretical_error(self, query: Array, key: Array) -> Array:
        count = self.features // self.features_each
        return self.error_of(query, key, count, self.options.orthogonal)

    def kernel_value(self, query: Array, key: Array) -> Array:
        return np.asarray(np.exp((query * key).sum(-1) / np.sqrt(self.head_dim)))


def mean_square(variance: Array, covariance: Array | None, count: int, width: int) -> Array:
    """(V + P C / m) / m for m = ``count``; ``covariance`` None: independent draws."""
    if covariance is not None:
        variance = variance + covariance * (orthogonal.paired(count, width) / count)
    return np.asarray(variance / count)
