"""Feature maps of several components, written out."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from tests.support.formulations.notation import (
    CAUSAL,
    D,
    both,
    formulation,
    heads_first,
    of_scores,
)


@formulation(CAUSAL, **both("softmax"))
def softmax_features(q, k, v):
    return of_scores(heads_first(q).softmax(-1), heads_first(k).softmax(-1), heads_first(v))


def taylor(x: Tensor) -> Tensor:
    """1, x and all products of two components."""
    x = x / D**0.25
    pairs = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2) / math.sqrt(2)
    return torch.cat([torch.ones_like(x[..., :1]), x, pairs], -1)


@formulation(CAUSAL, **both("taylor2"))
def taylor_features(q, k, v):
    return of_scores(taylor(heads_first(q)), taylor(heads_first(k)), heads_first(v))


class FrozenProjection(nn.Module):
    """Positive random features whose projection is a buffer, unscaled inputs."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.randn(2 * D, D, generator=torch.Generator().manual_seed(0))
        self.register_buffer("projection", drawn)

    def features(self, x: Tensor) -> Tensor:
        norm = x.square().sum(-1, keepdim=True) / 2
        projected = x @ self.projection.type_as(x).T
        return torch.exp(projected - norm) / math.sqrt(2 * D)

    def forward(self, q, k, v):
        q, k = (self.features(heads_first(x) / 4) for x in (q, k))
        return of_scores(q, k, heads_first(v))


formulation(CAUSAL, **both("favor+"))(FrozenProjection)
