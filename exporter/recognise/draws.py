"""Random values with which a recurrence stays finite, made of normal ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Draw = Callable[[np.ndarray], np.ndarray]


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
    return np.asarray(-0.3 * np.abs(x))
