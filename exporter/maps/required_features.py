"""How many features keep a map's kernel error with a stated probability.

With e_i the errors phi(q_i).phi(k_i) - K(q_i, k_i) of n pairs, R = mean e_i^2, over the mean of
K_i^2 where the error is relative, and E R from the map's exact variances,

    P(sqrt R >= error) <= E R / error^2         Markov's inequality; of one pair, Chebyshev's
    E sqrt R <= sqrt(E R)                       Jensen's inequality

so that E R <= (1 - probability) error^2 keeps the promise. E R falls about as 1/M.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from linexport.maps.attention_samples import HeadSamples
from linexport.maps.comparison import features_field
from linexport.models import feature_maps
from linexport.models.feature_maps import FeatureMap
from linexport.models.feature_maps.base import EXACT, FITTED, Array

_MANY = 10**12
"""Numbers of features from which on digits say nothing."""


@dataclass(frozen=True)
class Promise:
    """A kernel error that is to hold with a probability, on given pairs.

    Attributes:
        queries: (n, d).
        keys: (n, d).
        error: largest root mean square error.
        absolute: it is not relative to the kernel's root mean square.
        probability: of no larger one, over the draws.
    """

    queries: Array
    keys: Array
    error: float
    absolute: bool
    probability: float

    @property
    def mean_square(self) -> float:
        """Largest E R that keeps it."""
        return (1 - self.probability) * self.error**2

    def expected(self, module: FeatureMap) -> float:
        """E R of a map; NaN or infinite where its kernel overflows."""
        with np.errstate(all="ignore"):
            squares = module.theoretical_error(self.queries, self.keys)
            if squares is None:
                return 0.0
            kernel = module.kernel_value(self.queries, self.keys)
            scale = 1.0 if self.absolute else float(np.mean(kernel**2))
            return float(np.mean(squares)) / scale if scale else math.nan


@dataclass(frozen=True)
class RequiredFeatures:
    """Features that a promise takes.

    Attributes:
        needed: M; None where no number is known to do.
        options: the map's, with M or the largest allowed, which is fewer.
        mean_square: E R with these options; None where theory has none.
        reason: why ``needed`` is None or too many.
    """

    needed: int | None
    options: dict[str, Any]
    mean_square: float | None
    reason: str | None = None


def required_features(
    kind: str, samples: HeadSamples, promise: Promise, most: int
) -> RequiredFeatures:
    """The fewest features of a map that keep a promise; see ``RequiredFeatures``.

    Raises:
        UsageError: the map cannot be made for heads of this width.
    """
    width = promise.queries.shape[1]
    field, exactness = features_field(kind), feature_maps.find_map(kind).exactness
    if exactness == FITTED:
        return RequiredFeatures(
            None, {}, None, "fitted to samples: without a theory of its error nothing is promised"
        )
    if field is None or exactness == EXACT:
        module = _made(kind, width, {}, samples)
        return RequiredFeatures(module.features, {}, promise.expected(module))
    step = field.metadata.get("multiple_of", 1)
    first = max(step, field.metadata.get("at_least", 1))
    largest = most // step * step

    def expected(m: int) -> float:
        return promise.expected(_made(kind, width, {"features": m}, samples))

    reached = expected(largest)
    options = {"features": largest}
    if not math.isfinite(reached):
        return RequiredFeatures(None, options, None, "its variance is not finite on the data")
    if reached > promise.mean_square:
        needed = math.ceil(largest * reached / promise.mean_square)
        said = f"{needed:,}" if needed < _MANY else f"{float(needed):.1e}"
        return RequiredFeatures(needed, options, reached, f"the promise takes {said} features")
    # M E R changes little with M, so that each guess is nearly the last.
    kept = RequiredFeatures(largest, options, reached)
    failed = 0
    while True:
        assert kept.needed is not None and kept.mean_square is not None
        guess = kept.needed * kept.mean_square / promise.mean_square
        m = max(first, failed + step, math.ceil(guess / step) * step)
        if m >= kept.needed:
            return kept
        found = expected(m)
        if found <= promise.mean_square:
            kept = RequiredFeatures(m, {"features": m}, found)
        else:
            failed = m


def _made(kind: str, width: int, options: Mapping[str, object], samples: HeadSamples) -> FeatureMap:
    """The map, fitted where it can be; nothing is drawn where it cannot."""
    fitted = hasattr(feature_maps.find_map(kind), "fit")
    with warnings.catch_warnings(), torch.device("cpu" if fitted else "meta"):
        warnings.simplefilter("ignore", UserWarning)
        module = feature_maps.make(kind, width, options)
        if fitted:
            module.fit(samples.fit_queries, samples.fit_keys)  # type: ignore[operator]
    return module
