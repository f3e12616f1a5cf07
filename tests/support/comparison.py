"""Comparisons of results with references, within the rounding of a computation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def assert_close(
    got: Sequence[np.ndarray],
    want: Sequence[np.ndarray],
    magnitude: Sequence[np.ndarray] | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-37,
) -> None:
    """Equal shapes, NaN and infinity in the same places, and |got - want| <= rtol * magnitude."""
    scales = want if magnitude is None else magnitude
    for position, (g, w, scale) in enumerate(zip(got, want, scales, strict=True)):
        assert g.shape == w.shape, f"result {position}"
        finite = np.isfinite(w)
        np.testing.assert_array_equal(g[~finite], w[~finite], f"result {position}: not finite")
        error = np.abs(np.where(finite, g.astype(np.float64) - np.where(finite, w, 0), 0))
        limit = rtol * np.where(np.isfinite(scale), np.abs(scale), 0) + atol
        wrong = ~(error <= limit) & finite
        if wrong.any():
            at = tuple(np.argwhere(wrong)[0])
            raise AssertionError(
                f"result {position}: {wrong.sum()} of {wrong.size} values are off; at {at}: "
                f"{g[at]!r}, expected {w[at]!r} within {limit[at]:.2e}; "
                f"largest error / limit {np.nanmax(error / limit):.3g}"
            )
