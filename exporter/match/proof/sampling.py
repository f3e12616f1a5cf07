"""Samplers that keep a recurrence finite, as functions of normal values.

Inputs that are bounded in the example of a model are drawn within their bounds: where a decay
exceeds 1, or a logarithm gets a negative number, the original's values say nothing of a rewrite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

Draw = Callable[[np.ndarray], np.ndarray]

Bounds = Mapping[str, tuple[float, float]]
"""The least and the largest value of inputs, by name."""

_BOUNDS: ContextVar[Bounds] = ContextVar("bounds of inputs")


@contextmanager
def within(bounds: Bounds) -> Iterator[None]:
    """Draw inputs of the graph within these bounds, in proofs of its rewrites."""
    token = _BOUNDS.set(bounds)
    try:
        yield
    finally:
        _BOUNDS.reset(token)


def bounded(name: str, x: np.ndarray) -> np.ndarray | None:
    """Return numbers within the bounds of an input; None where it has none."""
    found = _BOUNDS.get({}).get(name)
    return None if found is None else found[0] + (found[1] - found[0]) * fraction(x)


def unit(x: np.ndarray) -> np.ndarray:
    """Return vectors whose length is about 1, as the keys of a delta rule have."""
    return np.asarray(x / np.sqrt(x.shape[-1]))


def fraction(x: np.ndarray) -> np.ndarray:
    """Return numbers between 0 and 1."""
    return np.asarray(1 / (1 + np.exp(-x)))


def signed(x: np.ndarray) -> np.ndarray:
    """Return numbers between -1 and 1, some of them 0."""
    return np.asarray(np.where(np.abs(x) < 0.05, 0.0, np.tanh(x)))


def falling(x: np.ndarray) -> np.ndarray:
    """Return logarithms of decays: states fade within some tens of tokens."""
    # Never above 0: exp of these is a decay.
    return np.asarray(-0.3 * np.abs(x))
