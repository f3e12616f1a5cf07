"""Squared errors of queries, binned by position or by the sharpness of their scores.

    position     t, in ``POSITIONS`` ranges of equal length
    sharpness    e^H / n        H = -sum_s p_s log p_s, the entropy of the weights; n keys visible

A query whose weights are all alike has the sharpness 1, one that looks at a single key 1/n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from linexport.manifest.linearization_records import ErrorBin
from linexport.models.attention_masks import visible
from linexport.models.softmax_calls import Call

POSITIONS = 8
SHARES = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)


@dataclass
class ErrorBins:
    """Sums over queries in bins.

    Attributes:
        bounds: low and high of each bin.
        sums: squared differences, squares of the true output, squared differences of attending to
            all keys alike, and the number of queries; (4, bins).
    """

    bounds: list[tuple[float, float]] = field(default_factory=list)
    sums: Tensor = field(default_factory=lambda: torch.zeros(0))

    def add(
        self, bounds: list[tuple[float, float]], bins: Tensor, there: Tensor, squares: Tensor
    ) -> None:
        """Add queries.

        Args:
            bounds: of all bins.
            bins: index of each query's bin, (B, H, T).
            there: queries that count, (B, H, T).
            squares: the first three of ``sums``, (3, B, H, T).
        """
        if not self.bounds:
            self.bounds, self.sums = bounds, torch.zeros(4, len(bounds), dtype=torch.float64)
        rows = torch.cat([squares, torch.ones_like(squares[:1])]).double()
        for total, row in zip(self.sums, rows, strict=True):
            total += torch.bincount(bins[there], row[there], len(bounds)).cpu()

    def records(self) -> tuple[ErrorBin, ...]:
        """The bins that have queries."""
        found = zip(self.bounds, self.sums.mT.tolist(), strict=True)
        return tuple(
            ErrorBin(low, high, round(count), _relative(difference, size), _relative(uniform, size))
            for (low, high), (difference, size, uniform, count) in found
            if count
        )


def _relative(squares: float, size: float) -> float | None:
    return math.sqrt(squares / size) if size and math.isfinite(squares) else None


def position_bins(length: int) -> tuple[list[tuple[float, float]], Tensor]:
    """Bounds of the bins, first and last position, and the bin of each position, (T,)."""
    count = min(POSITIONS, length)
    bins = torch.arange(length) * count // length
    first = [math.ceil(at * length / count) for at in range(count + 1)]
    return [(low, high - 1) for low, high in pairwise(first)], bins


def sharpness_bins(call: Call) -> tuple[list[tuple[float, float]], Tensor]:
    """Bounds of the bins and the bin of each query, (B, H, T)."""
    inner = torch.tensor(SHARES[1:-1], dtype=torch.float64)
    bins = torch.bucketize(attended_share(call), inner)
    return list(pairwise(SHARES)), bins


def attended_share(call: Call) -> Tensor:
    """e^H / n of every query, (B, H, T) float64; row by row, for the memory of T x S weights."""
    length, keys = call.query.shape[2], call.key.shape[2]
    repeats = call.query.shape[1] // call.key.shape[1]
    seen = None if call.attn_mask is None else visible(call.attn_mask)
    found = []
    for row in range(len(call.query)):
        key = call.key[row].repeat_interleave(repeats, 0).double()
        scores = call.query[row].double() @ key.mT * call.factor
        there = torch.ones(1, length, keys, dtype=torch.bool, device=scores.device)
        if seen is not None:
            there = there & (seen if seen.dim() < 4 else seen[row if len(seen) > 1 else 0])
        if call.is_causal:
            there = there.tril()
        log = scores.masked_fill(~there, -torch.inf).log_softmax(-1)
        entropy = -(log.exp() * log.masked_fill(~there, 0.0)).sum(-1)
        found.append(entropy.exp() / there.sum(-1).clamp(min=1))
    return torch.stack(found)
