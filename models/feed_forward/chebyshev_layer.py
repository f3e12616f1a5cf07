"""Products of Chebyshev polynomials of few inputs: the form of high degrees, where inputs are few.

    y = C T(z),   z = clip((x - centre) / half, -1, 1)
    T(z)_m = T_m1(z_1) ... T_md(z_d),   m_1 + ... + m_d <= n,   M = (d + n)! / (d! n!)

The T_k of one component come from those before them, in blocks that double:

    T_(m+j) = 2 T_m T_j - T_(m-j)

centre and half are of the box that the calibration data lie in, and w_i . x + b_i is within
[middle_i - half_i, middle_i + half_i] with half_i = sum_j |w_ij| half_j there. An x outside the box
is answered as its nearest point in it. C is computed once, see ``product_basis``; the linear layer
after the activation is in it where that is cheaper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from torch import Tensor

from linexport.errors import UsageError
from linexport.models.config import parse
from linexport.models.feature_maps.base import Array
from linexport.models.feed_forward import product_basis
from linexport.models.feed_forward.following import Following
from linexport.models.feed_forward.problem import MARGIN, FeedForwardProblem
from linexport.models.wide import WideBuffers

_MOST_WEIGHTS = 2**30
_AT_ONCE = 64
"""Rows of W whose coefficients are computed together."""


@dataclass(frozen=True, kw_only=True)
class ChebyshevConfig:
    """Configuration that, with its state_dict, rebuilds a layer.

    Attributes:
        in_features: d.
        out_features: outputs.
        degree: n.
        folded: the linear layer after the activation is in it.
    """

    in_features: int
    out_features: int
    degree: int
    folded: bool = False


class ChebyshevFeedForward(WideBuffers):
    """(..., out) of (..., d), as above; computed at least in float32.

    Everything it computes with is a buffer, zero until ``load_state_dict``.

    Raises:
        UsageError: the config asks for more weights than any layer has.
    """

    centre: Tensor
    inverse: Tensor
    weight: Tensor
    degrees: Tensor

    def __init__(self, config: ChebyshevConfig) -> None:
        super().__init__()
        self.config = asdict(config)
        d, n = config.in_features, config.degree
        self.register_buffer("centre", torch.zeros(d))
        self.register_buffer("inverse", torch.zeros(d))
        size = product_basis.count(d, n)
        if size * config.out_features > _MOST_WEIGHTS:
            raise UsageError(
                f"A Chebyshev feed-forward layer of degree {n} and {d} inputs has {size:,} weights "
                f"for each of {config.out_features:,} outputs; expected {_MOST_WEIGHTS:,} in all."
            )
        self.register_buffer("weight", torch.zeros(config.out_features, size))
        table = torch.from_numpy(product_basis.degree_table(d, n))
        self.register_buffer("degrees", table, persistent=False)

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> ChebyshevFeedForward:
        """The layer of a ``config``, to load a state_dict into.

        Raises:
            UsageError: names what does not fit.
        """
        return cls(parse(ChebyshevConfig, config, "a Chebyshev feed-forward layer"))

    def forward(self, x: Tensor) -> Tensor:
        """(..., out) of (..., d), in the dtype of x."""
        wide = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        z = ((wide - self.centre) * self.inverse).clamp(-1, 1)
        # Rows last: a polynomial of all rows is then one piece of memory.
        single = chebyshev(z.reshape(-1, z.shape[-1]).mT, self.config["degree"])
        y = (self.weight.to(wide.dtype) @ products(single, self.degrees)).mT
        return y.reshape(*x.shape[:-1], y.shape[-1]).to(x.dtype)


def chebyshev(z: Tensor, degree: int) -> Tensor:
    """T_0 to T_degree of z, as (degree + 1, *z.shape), in blocks that double."""
    found = torch.stack([torch.ones_like(z), z])
    while (top := len(found) - 1) < degree:
        more = min(top, degree - top)
        after = 2 * found[top:] * found[1 : more + 1] - found[top - more : top].flip(0)
        found = torch.cat([found, after])
    return found


def products(single: Tensor, degrees: Tensor) -> Tensor:
    """T_m(z), (M, rows), of the T_k of each component, (n + 1, d, rows), and of m (M, d)."""
    first, *rest = degrees.unbind(1)
    found = single[:, 0].index_select(0, first)
    for j, column in enumerate(rest, 1):
        found = found * single[:, j].index_select(0, column)
    return found


@dataclass(frozen=True)
class Box:
    """A box of x - problem.centre: ``centre`` and half its size ``half``, (d,) each."""

    centre: Array
    half: Array

    @classmethod
    def around(cls, problem: FeedForwardProblem) -> Box:
        """The box of the calibration data, and a margin."""
        x = problem.rows[:, :-1]
        low, high = x.min(0), x.max(0)
        return cls((low + high) / 2, (high - low) / 2 * (1 + MARGIN))

    @property
    def inverse(self) -> Array:
        """1 / half; 0 for components that never vary, which then stay at their value."""
        return np.divide(1.0, self.half, out=np.zeros_like(self.half), where=self.half > 0)

    def outside(self, x: Array) -> float:
        """Share of components that lie outside."""
        return float((np.abs(x - self.centre) > self.half).mean())


def on_box(problem: FeedForwardProblem) -> tuple[FeedForwardProblem, Box]:
    """The problem with the intervals that w_i . x + b_i takes in the box."""
    box = Box.around(problem)
    weight, constant = problem.vectors[:, :-1], problem.vectors[:, -1]
    middle = constant + weight @ box.centre
    return replace(problem, middle=middle, half=np.abs(weight) @ box.half), box


@dataclass(frozen=True)
class ChebyshevPlan:
    """A layer worked out but not built.

    Attributes:
        problem: with the intervals of the box.
        box: the box.
        series: coefficients of T_k(u_i), (out, n + 1).
        following: the linear layer after the activation, where it is folded in.
    """

    problem: FeedForwardProblem
    box: Box
    series: Array
    following: Following | None

    @property
    def degree(self) -> int:
        """n."""
        return self.series.shape[1] - 1

    @property
    def features(self) -> int:
        """M."""
        return product_basis.count(len(self.box.centre), self.degree)

    @property
    def outside(self) -> float:
        """Share of the held-out components that lie outside the box."""
        return self.box.outside(self.problem.held_out[:, :-1])

    def weight(self) -> Array:
        """C in float64, (outputs, M)."""
        basis = product_basis.ProductBasis.of(len(self.box.centre), self.degree)
        vectors = self.problem.scaled[:, :-1] * self.box.half
        parts = []
        for start in range(0, len(vectors), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            found = basis.compose(self.series[part], vectors[part])
            after = self.following
            parts.append(found if after is None else after.weight[:, part] @ found)
        if self.following is None:
            return np.concatenate(parts)
        weight = np.sum(parts, axis=0)
        weight[:, 0] += self.following.bias
        return np.asarray(weight)

    def layer(self) -> ChebyshevFeedForward:
        """The layer, in eval mode and float32."""
        weight = self.weight()
        config = ChebyshevConfig(
            in_features=len(self.box.centre),
            out_features=len(weight),
            degree=self.degree,
            folded=self.following is not None,
        )
        layer = ChebyshevFeedForward(config).eval()
        layer.centre.copy_(torch.from_numpy(self.problem.centre + self.box.centre))
        layer.inverse.copy_(torch.from_numpy(self.box.inverse))
        layer.weight.copy_(torch.from_numpy(weight))
        return layer

    def exactly(self, rows: Array) -> Array:
        """Outputs in float64 of rows x', (n, d + 1), by Clenshaw's recurrence on each u_i."""
        z = np.clip((rows[:, :-1] - self.box.centre) * self.box.inverse, -1, 1)
        u = z @ (self.problem.scaled[:, :-1] * self.box.half).T
        found = np.polynomial.chebyshev.chebval(u, self.series.T[:, None], tensor=False)
        y = np.asarray(found, np.float64)
        return y if self.following is None else self.following(y)


def multiply_adds(problem: FeedForwardProblem, following: Following | None, degree: int) -> int:
    """Multiply-adds of such a layer, for one token."""
    d = problem.rows.shape[1] - 1
    out = len(problem.vectors) if following is None else following.outputs
    return d + d * degree + (d - 1 + out) * product_basis.count(d, degree)
