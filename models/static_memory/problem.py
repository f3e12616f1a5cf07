"""Checked inputs of a fit of a static memory, the queries held out of it, and its errors.

Errors are relative: |o^ - o| / |o| in the Frobenius norm, over all of the queries in question.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from linexport.errors import UsageError

Array = NDArray[np.float64]

HELD_OUT = 0.25
"""Share of the sample queries that no fit sees."""


@dataclass(frozen=True)
class Fit:
    """Errors of a replacement, relative to the attention it replaces.

    Attributes:
        error: relative, on the queries it was fitted to.
        held_out_error: relative, on queries of the same distribution that it never saw.
        baseline_error: on the same held-out queries, of answering the mean of V every time: what a
            fit has to beat to be of any use.
    """

    error: float
    held_out_error: float
    baseline_error: float


@dataclass(frozen=True)
class StaticMemoryProblem:
    """Checked inputs of a fit, in float64.

    Attributes:
        queries: (n, d), those to fit to.
        held_out: (h, d), those to judge by.
        keys: (L, d).
        values: (L, d_v).
        scale: factor of q . k.
    """

    queries: Array
    held_out: Array
    keys: Array
    values: Array
    scale: float

    def attend(self, queries: Array) -> Array:
        """softmax(scale q K^T) V, (n, d_v)."""
        return softmax(self.scale * queries @ self.keys.T) @ self.values

    def judge(self, answer: Callable[[Array], Array]) -> Fit:
        """The errors of ``answer``, a function of queries."""
        true = self.attend(self.held_out)
        mean = np.broadcast_to(self.values.mean(0), true.shape)
        return Fit(
            error=relative_error(answer(self.queries), self.attend(self.queries)),
            held_out_error=relative_error(answer(self.held_out), true),
            baseline_error=relative_error(mean, true),
        )


def checked_problem(
    queries: Array,
    keys: Array,
    values: Array,
    count: int,
    scale: float,
    held_out: Array | None,
    seed: int,
) -> StaticMemoryProblem:
    """Check what a fit is given; where no queries to judge by are, set some aside.

    Raises:
        UsageError: names what does not fit, or is too little, and what to do.
    """
    given = {"queries": queries, "keys": keys, "values": values}
    if held_out is not None:
        given["held_out"] = held_out
    arrays = {name: np.asarray(x, dtype=np.float64) for name, x in given.items()}
    for name, x in arrays.items():
        if x.ndim != 2 or 0 in x.shape:
            raise UsageError(f"{name} has shape {x.shape}; expected (rows, width), none of them 0.")
        if not np.isfinite(x).all():
            raise UsageError(f"{name} has NaN or infinite entries. Drop those rows.")
    q, k, v = (arrays[name] for name in ("queries", "keys", "values"))
    judged = arrays.get("held_out", q)
    if not q.shape[1] == k.shape[1] == judged.shape[1] or len(k) != len(v):
        raise UsageError(
            f"queries {q.shape}, keys {k.shape} and values {v.shape} do not belong together; "
            "expected (n, d), (L, d) and (L, d_v)."
        )
    if not (np.isfinite(scale) and scale > 0):
        raise UsageError(f"scale is {scale}; expected a positive number, such as d ** -0.5.")
    if count < 1:
        raise UsageError(f"{count} pseudo-keys; expected at least 1.")
    if count >= len(k):
        raise UsageError(
            f"{count} pseudo-keys for {len(k)} keys save nothing. Ask for fewer than {len(k)}, or "
            "keep the keys."
        )
    if not q.any():
        raise UsageError(
            "All sample queries are zero, so that every key weighs the same. Record queries from "
            "the model on real inputs."
        )
    if held_out is None:
        order = np.random.default_rng(seed).permutation(len(q))
        aside = max(1, round(HELD_OUT * len(q)))
        q, judged = q[order[aside:]], q[order[:aside]]
    if len(q) < count:
        aside = 0 if held_out is not None else len(judged)
        raise UsageError(
            f"{len(q) + aside} sample queries, of which {aside} are held out to judge by, cannot "
            f"determine {count} pseudo-keys. Give more queries, or ask for fewer pseudo-keys."
        )
    return StaticMemoryProblem(q, judged, k, v, scale)


def softmax(scores: Array) -> Array:
    """Over the last axis."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def relative_error(got: Array, true: Array) -> float:
    """|got - true| / |true|; the absolute error where the truth is zero."""
    size = float(np.linalg.norm(true))
    return float(np.linalg.norm(got - true)) / (size or 1.0)
