"""Scans of two and of three tensors, which functions of a model's own are compared with.

    recurrence of (a, b)           h_t = a_t h_{t-1} + b_t,   a_1 a_2 ... a_t
    prefix softmax of (m, u, w)    M_t = max_{s <= t} m_s,
                                   U_t = sum_{s <= t} exp(m_s - M_t) u_s,   W_t alike

U and W are the two sums of softmax attention over earlier tokens (Aaren), kept from overflowing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from linexport.patches.scans import products, recurrence

__all__ = ["PREFIX_SOFTMAX", "RECURRENCE", "Scan"]

Draw = Callable[[Tensor, torch.Generator], Tensor]
"""Writes random numbers to a tensor."""


@dataclass(frozen=True)
class Scan:
    """A scan of some tensors.

    Attributes:
        compute: returns all of its results, of tensors with the tokens along dimension 1.
        states: places of those results that are not seen from one tensor alone: one is needed.
        orders: places of its tensors among those that a function is given.
        draws: numbers for its tensors, one after the other. Functions must give equal numbers.
        partly: how many of the last draws are compared only where a function gives a number.
        same_rank: whether its tensors must have one rank; otherwise they have that of the first
            or more.
    """

    compute: Callable[..., Sequence[Tensor]]
    states: frozenset[int]
    orders: tuple[tuple[int, ...], ...]
    draws: tuple[tuple[Draw, ...], ...]
    partly: int = 0
    same_rank: bool = False

    def takes(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether tensors have the ranks that the scan takes."""
        first, *rest = (x.dim() for x in tensors)
        return all(rank == first or (rank > first and not self.same_rank) for rank in rest)


def _uniform(low: float, high: float, x: Tensor, generator: torch.Generator) -> Tensor:
    return x.uniform_(low, high, generator=generator)


def _normal(size: float, x: Tensor, generator: torch.Generator) -> Tensor:
    return x.normal_(generator=generator).mul_(size)


def _scores(size: float, mean: float, x: Tensor, generator: torch.Generator) -> Tensor:
    """Write multiples of 1/8, whose differences float32 has exactly."""
    return x.normal_(generator=generator).mul_(8 * size).round_().div_(8).add_(mean)


def prefix_softmax(score: Tensor, *weighted: Tensor) -> list[Tensor]:
    """Return the largest score so far, and the sums of exp(score - largest) times others."""
    largest = torch.full_like(score[:, 0], torch.finfo(score.dtype).min)
    sums = [torch.zeros_like(_spread(score, x)[:, 0] * x[:, 0]) for x in weighted]
    steps = []
    for t in range(score.shape[1]):
        before, largest = largest, torch.maximum(largest, score[:, t])
        kept, new = torch.exp(before - largest), torch.exp(score[:, t] - largest)
        sums = [
            total * _spread(kept, total) + x[:, t] * _spread(new, total)
            for total, x in zip(sums, weighted, strict=True)
        ]
        steps.append([largest, *sums])
    return [torch.stack(list(states), 1) for states in zip(*steps, strict=True)]


def _spread(x: Tensor, like: Tensor) -> Tensor:
    """Return a number for each of the last dimensions of another tensor."""
    return x[(..., *[None] * (like.dim() - x.dim()))]


RECURRENCE = Scan(
    lambda a, b: (recurrence(a, b), products(a)),
    frozenset({0}),
    ((0, 1), (1, 0)),
    # Decays in (0, 1) are what functions in log space take, and others as well.
    (
        (partial(_uniform, 0.2, 1.0), partial(_normal, 1.0)),
        (partial(_uniform, -1.0, 1.0), partial(_normal, 1.0)),
        (partial(_uniform, -1.3, 1.3), partial(_normal, 1e4)),
    ),
    partly=2,
    same_rank=True,
)

PREFIX_SOFTMAX = Scan(
    prefix_softmax,
    frozenset({1, 2}),
    ((0, 1, 2), (1, 0, 2), (2, 0, 1)),
    # Scores far below 0 show a bound; differences above 709 are those whose exp overflows float64.
    tuple(
        (partial(_scores, size, mean), partial(_normal, 1.0), partial(_normal, 1e4))
        for size, mean in ((1.0, 0.0), (1.0, -1e3), (1.0, 1e3), (300.0, 0.0))
    ),
)
