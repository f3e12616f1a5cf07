"""Quadratic in few directions, of least squared error: a form that can cost less than the layer.

    y ~ L x + B phi(U x) + c        U (r, d), phi all products z_i z_j, i <= j, of z = [U x, 1]

y is the output of the activation, or of the linear layer after it, which is then folded in. The
least-squares polynomials of degree 2 say where y is curved: sum_i w2_ji c_i2 v_i v_i^T = Q_j is the
quadratic part of output j, and for inputs of covariance C the r directions

    U = E^T C^(-1/2),   E the leading eigenvectors of sum_j (C^(1/2) Q_j C^(1/2))^2

keep the most of it. L, B and c are then fitted to y itself. Multiply-adds: (r + out) d of the
projections and (2 + out) (r + 1)(r + 2)/2 of the products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from linexport.errors import UsageError
from linexport.models.config import parse
from linexport.models.feature_maps.base import Array
from linexport.models.feed_forward import least_squares
from linexport.models.feed_forward.following import Following
from linexport.models.feed_forward.powers import Cost, exact
from linexport.models.feed_forward.problem import FeedForwardProblem
from linexport.models.wide import WideBuffers

SELECTED_BY = 0.25
"""Share of the fitted rows that the rank is chosen by."""

_RIDGE = 1e-4
_FLOOR = 1e-6
"""Directions in which x varies less than this share of its most are left out of U."""


@dataclass(frozen=True, kw_only=True)
class LowRankConfig:
    """Configuration that, with its state_dict, rebuilds a layer.

    Attributes:
        in_features: d.
        out_features: outputs.
        rank: r.
        folded: the linear layer after the activation is in it.
    """

    in_features: int
    out_features: int
    rank: int
    folded: bool = False


class LowRankFeedForward(WideBuffers):
    """(..., out) of (..., d), as above; computed at least in float32.

    Everything it computes with is a buffer, zero until ``fill`` or ``load_state_dict``.
    """

    centre: Tensor
    projection: Tensor
    linear: Tensor
    products: Tensor
    first: Tensor
    second: Tensor

    def __init__(self, config: LowRankConfig) -> None:
        super().__init__()
        self.config = asdict(config)
        d, out, r = config.in_features, config.out_features, config.rank
        first, second = np.triu_indices(r + 1)
        self.register_buffer("first", torch.from_numpy(first), persistent=False)
        self.register_buffer("second", torch.from_numpy(second), persistent=False)
        self.register_buffer("centre", torch.zeros(d))
        self.register_buffer("projection", torch.zeros(r, d))
        self.register_buffer("linear", torch.zeros(out, d))
        self.register_buffer("products", torch.zeros(out, len(first)))

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> LowRankFeedForward:
        """The layer of a ``config``, to load a state_dict into.

        Raises:
            UsageError: names what does not fit.
        """
        return cls(parse(LowRankConfig, config, "a low-rank feed-forward layer"))

    def forward(self, x: Tensor) -> Tensor:
        """(..., out) of (..., d), in the dtype of x."""
        wide = x.to(torch.promote_types(x.dtype, self.linear.dtype)) - self.centre
        # Rows last: a product of all rows is then one piece of memory.
        rows = wide.reshape(-1, wide.shape[-1]).mT
        z = F.pad(self.projection.to(rows.dtype) @ rows, (0, 0, 0, 1), value=1.0)
        phi = z.index_select(0, self.first) * z.index_select(0, self.second)
        y = self.linear.to(rows.dtype) @ rows + self.products.to(rows.dtype) @ phi
        y = y.mT.reshape(*x.shape[:-1], len(y))
        return y.to(x.dtype)


@dataclass(frozen=True)
class LowRankPlan:
    """A layer of one rank, worked out in float64.

    Attributes:
        rank: r.
        multiply_adds: for one token.
        error: mean |y^ - y|^2 on the rows that the rank is chosen by.
        projection: U.
        linear: L.
        products: B and c.
    """

    rank: int
    multiply_adds: int
    error: float
    projection: Array
    linear: Array
    products: Array

    def exactly(self, rows: Array) -> Array:
        """Outputs in float64 of rows x', (n, d + 1)."""
        weights = np.concatenate([self.linear, self.products], 1)
        outputs: Array = _features(rows, self.projection) @ weights.T
        return outputs

    def layer(self, problem: FeedForwardProblem, folded: bool) -> LowRankFeedForward:
        """The layer, in eval mode and float32."""
        out, d = self.linear.shape
        config = LowRankConfig(in_features=d, out_features=out, rank=self.rank, folded=folded)
        layer = LowRankFeedForward(config).eval()
        layer.centre.copy_(torch.from_numpy(problem.centre))
        for name in ("projection", "linear", "products"):
            getattr(layer, name).copy_(torch.from_numpy(getattr(self, name)))
        return layer


def fit(
    problem: FeedForwardProblem,
    following: Following | None,
    target_error: float | None,
    max_cost: int,
) -> LowRankPlan:
    """The rank of least error among those that cost less than before, and at most ``max_cost``.

    With a target error, the smallest rank that comes within it.

    Raises:
        UsageError: no rank costs so little; or none of those comes within the target.
    """
    before = cost_before(problem, following)
    most = min(before - 1, max_cost)
    best = None
    for plan in _plans(problem, following, most):
        if target_error is not None and plan.error <= target_error:
            return plan
        if best is None or plan.error < best.error:
            best = plan
    if best is None:
        limit = f"at most the {max_cost:,} multiply-adds of max_cost"
        if max_cost >= before:
            both = "" if following is None else " and the one after it"
            limit = f"less than the {before:,} multiply-adds of the layer{both}"
        raise UsageError(
            f"No low-rank form costs {limit}: rank 1 costs "
            f"{multiply_adds(problem, following, 1):,}. It pays where a layer is much wider inside "
            "than at both ends."
        )
    if target_error is not None:
        raise UsageError(
            f"No low-rank form of at most {most:,} multiply-adds comes within target_error "
            f"{target_error:g}: rank {best.rank}, of {best.multiply_adds:,} multiply-adds in place "
            f"of {before:,}, has {best.error:.3g}."
        )
    return best


def cost_before(problem: FeedForwardProblem, following: Following | None) -> int:
    """Multiply-adds of W x, and of the product after it where that is folded."""
    inside, d = len(problem.vectors), problem.rows.shape[1] - 1
    return inside * (d + (0 if following is None else following.outputs))


def multiply_adds(problem: FeedForwardProblem, following: Following | None, rank: int) -> int:
    """Multiply-adds of a low-rank form, for one token."""
    d = problem.rows.shape[1] - 1
    out = len(problem.vectors) if following is None else following.outputs
    return (
        Cost(rank + 1, out, [exact(2, rank + 1)]).multiply_adds
        + (rank + out) * d
        - (rank + 1) * out
    )


def _plans(
    problem: FeedForwardProblem, following: Following | None, most: int
) -> Iterator[LowRankPlan]:
    """Plans of rising rank that cost at most so many multiply-adds."""
    ranks = []
    for rank in range(1, problem.rows.shape[1]):
        if multiply_adds(problem, following, rank) > most:
            break
        ranks.append(rank)
    if not ranks:
        return
    want = problem.outputs(problem.rows)
    want = want if following is None else following(want)
    directions = _directions(problem, following)
    aside = max(1, round(SELECTED_BY * len(want)))
    for rank in ranks[: len(directions)]:
        projection = directions[:rank]
        features = _features(problem.rows, projection)
        found = _ridge(features[aside:], want[aside:])
        error = float(((features[:aside] @ found - want[:aside]) ** 2).sum(1).mean())
        weights = _ridge(features, want).T
        d = problem.rows.shape[1] - 1
        yield LowRankPlan(
            rank,
            multiply_adds(problem, following, rank),
            error,
            projection,
            weights[:, :d],
            weights[:, d:],
        )


def _directions(problem: FeedForwardProblem, following: Following | None) -> Array:
    """Rows of U by how much of the quadratic part they keep, (at most d, d)."""
    found = least_squares.of_degree(problem, 2)
    v, c = found.vectors[:, :-1], found.coefficients[:, 2]
    x = problem.rows[:, :-1]
    size, axes = np.linalg.eigh(x.T @ x / len(x))
    kept = size > _FLOOR * size[-1]
    root = axes[:, kept] * np.sqrt(size[kept])
    curved = v @ root
    # sum_j Q_j^2 without the Q_j: Q_j = curved^T diag(w2_j c) curved.
    mixing = np.eye(len(c)) if following is None else following.weight
    scaled = mixing * c
    inner = (curved @ curved.T) * (scaled.T @ scaled)
    _, leading = np.linalg.eigh(curved.T @ inner @ curved)
    inverse = axes[:, kept] / np.sqrt(size[kept])
    return np.ascontiguousarray((inverse @ leading[:, ::-1]).T)


def _features(rows: Array, projection: Array) -> Array:
    """[x, phi(U x)], in the order of the layer."""
    z = np.pad(rows[:, :-1] @ projection.T, ((0, 0), (0, 1)), constant_values=1.0)
    first, second = np.triu_indices(z.shape[1])
    return np.concatenate([rows[:, :-1], z[:, first] * z[:, second]], axis=1)


def _ridge(features: Array, want: Array) -> Array:
    """Least squares with a small weight on the coefficients, (features, out)."""
    gram = features.T @ features
    weight = _RIDGE * np.diag(gram) + 1e-12 * np.trace(gram)
    found = np.linalg.solve(gram + np.diag(weight), features.T @ want)
    return np.asarray(found)
