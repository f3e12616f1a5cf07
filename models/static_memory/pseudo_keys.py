"""e pseudo-keys for L fixed keys: k-means, then least squares, then optional gradient steps.

    K^ = k-means centroids of K        b = log cluster sizes
    V^ = argmin |softmax(scale Q K^^T + b) V^ - softmax(scale Q K^T) V|^2 + ridge n |V^ - V_c|^2

Keys are clustered twice, once all alike and once weighed by the attention that the sample queries
pay them, which separates the few keys of sharp attention; the nearer fit is kept. V_c are the
mean values of the clusters, which V^ is drawn to where the sample queries say nothing: a pseudo-key
none of them attends to keeps the values of its keys. So the fit has one solution whatever the rank
of the weights, which is 1 where attention is sharp; without a ridge it is the least correction of
V_c. The step from L to e keys makes a query cost O(e (d + d_v)).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from linexport.errors import UsageError
from linexport.models.static_memory.kmeans import Clusters, kmeans
from linexport.models.static_memory.problem import (
    Array,
    Fit,
    StaticMemoryProblem,
    checked_problem,
    softmax,
)

RIDGE = 1e-6
EVEN = 1e-3
"""Share of a key's weight in k-means that does not depend on the attention it is paid."""
_LEARNING_RATE = 0.01


@dataclass(frozen=True)
class PseudoMemory:
    """Replacement of keys and values: o = softmax(scale q keys^T + bias) values.

    Attributes:
        keys: K^, (e, d).
        bias: b, (e,).
        values: V^, (e, d_v).
        scale: factor of q . k.
        fit: how near it comes.
    """

    keys: Array
    bias: Array
    values: Array
    scale: float
    fit: Fit

    def attend(self, queries: Array) -> Array:
        """(n, d_v) of (n, d), in float64."""
        return softmax(self.scale * queries @ self.keys.T + self.bias) @ self.values


def fit_pseudo_keys(
    queries: Array,
    keys: Array,
    values: Array,
    count: int,
    *,
    scale: float = 1.0,
    ridge: float = RIDGE,
    refine_steps: int = 0,
    held_out: Array | None = None,
    seed: int = 0,
) -> PseudoMemory:
    """Fit ``count`` pseudo-keys to sample queries; computed in float64.

    Args:
        queries: (n, d) samples of the real distribution.
        keys: (L, d).
        values: (L, d_v).
        count: e, less than L.
        scale: factor of q . k; 1 where the queries carry it already.
        ridge: weight of the pull towards the clusters' mean values, per query.
        refine_steps: of gradient descent on (K^, b, V^) afterwards.
        held_out: (h, d) further samples, to judge by; None: a quarter of ``queries``.
        seed: of that split and of k-means.

    Raises:
        UsageError: all-zero queries, fewer than ``count`` to fit to, count >= L, or shapes that
            do not belong together.
    """
    if ridge < 0 or refine_steps < 0:
        raise UsageError(f"ridge {ridge} and refine_steps {refine_steps} cannot be negative.")
    problem = checked_problem(queries, keys, values, count, scale, held_out, seed)
    clusterings = [kmeans(problem.keys, count, seed, w) for w in (None, _attention_paid(problem))]
    fits = [_of_clusters(problem, clusters, ridge) for clusters in clusterings]
    nearest = min(fits, key=lambda found: found.fit.error)
    if not refine_steps:
        return nearest
    start = (nearest.keys, nearest.bias, nearest.values)
    return _memory(problem, *_refine(problem, start, refine_steps))


def _attention_paid(problem: StaticMemoryProblem) -> Array:
    """Weights of the keys, (L,): the mean attention they get, and ``EVEN`` of an equal share."""
    paid = softmax(problem.scale * problem.queries @ problem.keys.T).mean(0)
    return np.asarray((1 - EVEN) * paid + EVEN / len(paid))


def _of_clusters(problem: StaticMemoryProblem, clusters: Clusters, ridge: float) -> PseudoMemory:
    bias, prior = np.log(clusters.sizes), clusters.means(problem.values)
    fitted = _least_squares(problem, clusters.centroids, bias, prior, ridge)
    return _memory(problem, clusters.centroids, bias, fitted)


def _memory(problem: StaticMemoryProblem, keys: Array, bias: Array, values: Array) -> PseudoMemory:
    unjudged = PseudoMemory(keys, bias, values, problem.scale, Fit(np.nan, np.nan, np.nan))
    return PseudoMemory(keys, bias, values, problem.scale, problem.judge(unjudged.attend))


def _least_squares(
    problem: StaticMemoryProblem, keys: Array, bias: Array, prior: Array, ridge: float
) -> Array:
    """V^: the correction of ``prior`` with the least squared error and size."""
    weights = softmax(problem.scale * problem.queries @ keys.T + bias)
    missing = problem.attend(problem.queries) - weights @ prior
    # As extra rows, not as a normal equation, which would square the condition number.
    pull = np.sqrt(ridge * len(weights)) * np.eye(len(keys))
    system = np.concatenate([weights, pull])
    target = np.concatenate([missing, np.zeros_like(prior)])
    return np.asarray(prior + np.linalg.lstsq(system, target, rcond=None)[0])


def _refine(
    problem: StaticMemoryProblem, start: tuple[Array, Array, Array], steps: int
) -> tuple[Array, Array, Array]:
    """Adam on the squared error; the best parameters it comes by."""
    queries = torch.from_numpy(problem.scale * problem.queries)
    target = torch.from_numpy(problem.attend(problem.queries))
    parameters = [torch.from_numpy(x.copy()).requires_grad_() for x in start]
    optimizer = torch.optim.Adam(parameters, lr=_LEARNING_RATE)
    best, least = start, np.inf
    for _ in range(steps + 1):
        keys, bias, values = parameters
        loss = ((queries @ keys.T + bias).softmax(-1) @ values - target).square().mean()
        if loss.item() < least:
            least = loss.item()
            best = tuple(p.detach().numpy().copy() for p in parameters)  # type: ignore[assignment]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return best
