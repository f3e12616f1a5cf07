"""The SVD route to a smaller static memory: a published baseline, kept to be measured against.

    A = softmax(scale Q K^T) ~ U S D of rank e         P = U S + offset, offset = 1 - min(U S)
    M = lstsq(P, U S)    V^ = M D V    K^ = lstsq(scale Q, log P)^T
    o = rowsum(P) * softmax(scale q K^^T) V^

Source: the notebook "QKV-decomp POC" of github.com/IsaacRe/Forgetful-Transformers. Do not ship it:
rowsum(P) is known only for the queries of the fit, and log P is linear in q only where A is
degenerate, as in the notebook's own example, whose keys are nearly all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from linexport.models.static_memory.problem import (
    Array,
    Fit,
    checked_problem,
    relative_error,
    softmax,
)


@dataclass(frozen=True)
class SvdMemory:
    """o = row_sum * softmax(scale q keys^T) values.

    Attributes:
        keys: K^, (e, d).
        values: V^, (e, d_v).
        row_sums: rowsum(P) of every query of the fit, (n,).
        scale: factor of q . k.
        fit: how near it comes; on held-out queries with the mean of ``row_sums``.
    """

    keys: Array
    values: Array
    row_sums: Array
    scale: float
    fit: Fit

    def attend(self, queries: Array, row_sums: Array | float) -> Array:
        """(n, d_v) of (n, d), in float64, given the row sum of each query."""
        weights = softmax(self.scale * queries @ self.keys.T)
        return np.asarray(np.reshape(row_sums, (-1, 1)) * (weights @ self.values))


def fit_svd(
    queries: Array,
    keys: Array,
    values: Array,
    count: int,
    *,
    scale: float = 1.0,
    held_out: Array | None = None,
    seed: int = 0,
) -> SvdMemory:
    """Fit ``count`` pseudo-keys by SVD; arguments and errors as of ``fit_pseudo_keys``.

    Where the queries are rank-deficient, K^ is the smallest of the equally good fits.
    """
    problem = checked_problem(queries, keys, values, count, scale, held_out, seed)
    weights = softmax(scale * problem.queries @ problem.keys.T)
    left, singular, right = np.linalg.svd(weights, full_matrices=False)
    low = left[:, :count] * singular[:count]
    shifted = low + 1 - low.min()
    mixed = np.linalg.lstsq(shifted, low, rcond=None)[0] @ right[:count]
    projected = np.linalg.lstsq(scale * problem.queries, np.log(shifted), rcond=None)[0].T
    found = SvdMemory(
        projected,
        mixed @ problem.values,
        shifted.sum(1),
        scale,
        Fit(np.nan, np.nan, np.nan),
    )
    judged = problem.judge(lambda q: found.attend(q, float(found.row_sums.mean())))
    own = found.attend(problem.queries, found.row_sums)
    error = relative_error(own, problem.attend(problem.queries))
    fit = Fit(error, judged.held_out_error, judged.baseline_error)
    return SvdMemory(found.keys, found.values, found.row_sums, scale, fit)
