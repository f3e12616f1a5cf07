"""How many features keep an error with a stated probability, by drawing the map many times.

The promise P(error <= e) >= p is shown with confidence 1 - a by k successes in n independent draws
where the one-sided bound of Clopper and Pearson is at least p:

    P(Bin(n, p) >= k) <= a

Few draws find the number of features; draws of their own then show the promise. Where these fail,
more features are tried with half of what is left of a, so that all tries together keep it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from linexport.maps.attention_samples import HeadSamples
from linexport.maps.comparison import MapChoice, features_field
from linexport.models import feature_maps
from linexport.models.feature_maps import FeatureMap
from linexport.models.feature_maps.base import UNBIASED

CONFIDENCE = 1 - 1e-3
"""Confidence of the bound on the probability, over the draws of one plan."""

SEARCHED = 40
"""Draws of each number of features that is tried in the search."""

FEW = 5
"""Draws whose median error is stated where all features that are allowed are too few."""

NEARLY = 1.1
"""The ratio of two numbers of features at which the search ends."""

MORE = 1.15
"""Times the features of a try whose promise was not shown."""

FIRST_SEED = 1_000_000
"""Seeds of draws begin here, so that none is that of a map which is measured afterwards."""


@dataclass(frozen=True)
class Goal:
    """An error that is to be kept with a probability.

    Attributes:
        error_of: the error of one draw of a map.
        limit: the largest error.
        probability: of no larger one, over the draws of the map.
    """

    error_of: Callable[[FeatureMap], float]
    limit: float
    probability: float


@dataclass(frozen=True)
class SimulatedFeatures:
    """Features with which a goal is reached.

    Attributes:
        needed: M; None where the most that are allowed do not reach it.
        options: the map's, with M or the largest allowed.
        draws: that the promise was shown with; 0 for a map that is not random.
        kept: of them, those within the limit.
        reason: why ``needed`` is None.
    """

    needed: int | None
    options: dict[str, Any]
    draws: int = 0
    kept: int = 0
    reason: str | None = None


def simulated_features(
    kind: str, samples: HeadSamples, goal: Goal, most: int, seed: int
) -> SimulatedFeatures:
    """Return about the fewest features of a map that reach a goal.

    Raises:
        UsageError: the map cannot be made for heads of this width.
    """
    drawn = _Draws(kind, samples, goal, seed)
    field = features_field(kind)
    if feature_maps.find_map(kind).exactness != UNBIASED:
        return _of_one(drawn, {})
    if field is None:
        module = drawn.module({})
        return _shown(drawn, [module.features], lambda _: {}, module.features)
    step = field.metadata.get("multiple_of", 1)
    first = max(step, field.metadata.get("at_least", 1))
    largest = max(first, most // step * step)
    start = _search(drawn, first, largest, step)
    if start is None:
        median = float(np.median(list(drawn.errors({"features": largest}, FEW))))
        reason = f"with {largest:,} features its error is {median:.2g}, the median of {FEW} draws"
        return SimulatedFeatures(None, {"features": largest}, reason=reason)
    return _shown(drawn, _tries(start, largest, step), lambda m: {"features": m}, largest)


def allowed_failures(draws: int, probability: float, chance: float) -> int:
    """Return how many of the draws may fail for a promise to be shown; -1 where none may.

    With one failure more, P(Bin(draws, probability) >= successes) is above ``chance``.
    """
    total, failures = 0.0, -1
    log_p, log_q = math.log(probability), math.log1p(-probability)
    for k in range(draws + 1):
        ways = math.lgamma(draws + 1) - math.lgamma(k + 1) - math.lgamma(draws - k + 1)
        total += math.exp(ways + k * log_q + (draws - k) * log_p)
        if total > chance:
            return failures
        failures = k
    return failures


class _Draws:
    """Independent draws of one map, of which none is used twice."""

    def __init__(self, kind: str, samples: HeadSamples, goal: Goal, seed: int) -> None:
        self.kind, self.samples, self.goal = kind, samples, goal
        self._seed = FIRST_SEED + seed

    def module(self, options: dict[str, Any]) -> FeatureMap:
        """Return the next draw."""
        self._seed += 1
        width = self.samples.queries.shape[2]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            choice = MapChoice(self.kind, options)
            return choice.draws(width, self.samples, self._seed, most=1)[0]

    def errors(self, options: dict[str, Any], count: int) -> Iterator[float]:
        """Yield the errors of draws; one that is not finite is infinite."""
        for _ in range(count):
            error = self.goal.error_of(self.module(options))
            yield error if math.isfinite(error) else math.inf

    def within(self, options: dict[str, Any], count: int, failures: int) -> int | None:
        """Return how many of the draws are within the limit; None where too many fail."""
        failed = 0
        for error in self.errors(options, count):
            failed += error > self.goal.limit
            if failed > failures:
                return None
        return count - failed


def _of_one(drawn: _Draws, options: dict[str, Any]) -> SimulatedFeatures:
    """Return what a map without draws needs: it reaches the goal or not."""
    module = drawn.module(options)
    error = drawn.goal.error_of(module)
    found = SimulatedFeatures(module.features, options)
    if error <= drawn.goal.limit:
        return found
    return replace(found, needed=None, reason=f"its error is {error:.2g}, however often it is made")


def _search(drawn: _Draws, first: int, largest: int, step: int) -> int | None:
    """Return a number of features that half of the failures allowed are seen with; None of none."""
    failures = int(SEARCHED * (1 - drawn.goal.probability) / 2)

    def suffices(m: int) -> bool:
        return drawn.within({"features": m}, SEARCHED, failures) is not None

    # From few features on, as the draws of many take time.
    too_few, enough = first - step, first
    while not suffices(enough):
        if enough == largest:
            return None
        too_few, enough = enough, min(_rounded(2 * enough, step), largest)
    while enough > max(too_few + step, NEARLY * too_few):
        m = min(max(_rounded(math.sqrt(too_few * enough), step), too_few + step), enough - step)
        if suffices(m):
            enough = m
        else:
            too_few = m
    return enough


def _tries(start: int, largest: int, step: int) -> Iterator[int]:
    while start < largest:
        yield start
        start = min(max(_rounded(start * MORE, step), start + step), largest)
    yield largest


def _rounded(number: float, step: int) -> int:
    return math.ceil(number / step) * step


def _shown(
    drawn: _Draws,
    tries: Iterator[int] | list[int],
    options_of: Callable[[int], dict[str, Any]],
    largest: int,
) -> SimulatedFeatures:
    """Return the first number of features whose promise is shown by draws of its own."""
    chance, p = 1 - CONFIDENCE, drawn.goal.probability
    for m in tries:
        chance /= 2
        least = math.ceil(math.log(chance) / math.log(p))
        draws = math.ceil(least * (4 if m <= 512 else 1.5))
        kept = drawn.within(options_of(m), draws, allowed_failures(draws, p, chance))
        if kept is not None:
            return SimulatedFeatures(m, options_of(m), draws, kept)
    reason = (
        f"with {largest:,} features the error is within {drawn.goal.limit:g} about as often as "
        "promised, and not shown to be"
    )
    return SimulatedFeatures(None, options_of(largest), reason=reason)
