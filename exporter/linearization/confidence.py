"""Upper bounds on a mean drop, with a stated confidence, from rows that no choice was made by.

    rows right or wrong    mean = P(worse) - P(better); Clopper and Pearson's exact bounds of both,
                           each with half of the risk
    any other loss         mean + t s / sqrt(n), Student's quantile of n - 1 degrees of freedom

Differences are paired: both models answer the same rows, whose own difficulty cancels. A row is one
sample, as tokens of a row depend on each other. Where rows are right or wrong, few of them differ,
and a spread that is estimated from none would promise too much: those bounds are exact. Means over
the tokens of a row are near to normal; Hoeffding's inequality, which needs no such thing, would
need a range and tens of thousands of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import mpmath
from torch import Tensor

CONFIDENCE = 0.95

_HALVINGS = 60
"""Bisections of an interval, after which it is as narrow as float64 tells."""


def upper_bound(differences: Tensor, counted: bool, confidence: float = CONFIDENCE) -> float:
    """Return a number that the mean drop exceeds with a probability of at most 1 - confidence.

    Args:
        differences: loss after minus loss before, float64 (n), one of each row.
        counted: they are -1, 0 or 1: rows are right or wrong.
        confidence: of the bound.

    Returns:
        The bound; infinite of fewer than two rows, or where a difference is not finite.
    """
    count = len(differences)
    if count < 2 or not bool(differences.isfinite().all()):
        return math.inf
    if counted:
        risk = (1 - confidence) / 2
        worse, better = int((differences > 0).sum()), int((differences < 0).sum())
        return _most(worse, count, risk) - (1 - _most(count - better, count, risk))
    spread = float(differences.std()) / math.sqrt(count)
    return float(differences.mean()) + _student(count - 1, confidence) * spread


@cache
def _most(found: int, count: int, risk: float) -> float:
    """The largest probability with which at most ``found`` of ``count`` have that risk."""
    if found >= count:
        return 1.0

    def tail(share: float) -> float:
        return float(mpmath.betainc(count - found, found + 1, 0, 1 - share, regularized=True))

    return _falling(tail, risk, 1.0)


@cache
def _student(freedom: int, confidence: float) -> float:
    """The quantile of Student's distribution."""

    def tail(t: float) -> float:
        part = freedom / (freedom + t * t)
        return float(mpmath.betainc(freedom / 2, 0.5, 0, part, regularized=True)) / 2

    top = 2.0
    while tail(top) > 1 - confidence:
        top *= 2
    return _falling(tail, 1 - confidence, top)


def _falling(function: Callable[[float], float], value: float, top: float) -> float:
    """Where a function that falls on [0, top] takes a value."""
    low, high = 0.0, top
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > value else (low, middle)
    return high
