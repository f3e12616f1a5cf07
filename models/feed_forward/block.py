"""The feed-forward layer of every reference block: y = W_2 gelu(W_1 x + b_1) + b_2."""

from __future__ import annotations

from torch import nn


def feed_forward(dim: int, hidden_dim: int | None = None) -> nn.Sequential:
    """(..., dim) to (..., dim), ``hidden_dim`` wide inside; None: four times dim."""
    hidden = hidden_dim or 4 * dim
    return nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
