"""Layers of heads around a mixer, and the products of Mamba-2's listing in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.formulations.decayed import segsum

WIDTH, HEADS, D, CHUNK = 16, 2, 8, 8


class Projections(nn.Module):
    """Projections to heads and back.

    Args:
        mixer: of queries, keys and values (B, H, T, D) and logarithms of decays (B, H, T).
    """

    def __init__(self, mixer: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixer, self.inside = mixer, nn.Linear(WIDTH, 3 * WIDTH + HEADS)
        self.out = nn.Linear(WIDTH, WIDTH)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what the mixer takes, of (B, T, WIDTH)."""
        *qkv, gate = self.inside(x).split([WIDTH, WIDTH, WIDTH, HEADS], -1)
        q, k, v = (y.unflatten(-1, (HEADS, D)).transpose(1, 2) for y in qkv)
        return q, k, v, -F.softplus(gate).mT

    def joined(self, out: Tensor) -> Tensor:
        """Return (B, T, WIDTH) of heads (B, H, T, D)."""
        projected: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return projected


def chunk_products(
    q: Tensor, k: Tensor, v: Tensor, steps: Tensor, first: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return outputs and the state behind the last chunk, as published.

    Queries, keys and values are (B, chunks, CHUNK, H, D), logarithms of decays (B, H, chunks,
    CHUNK), a state before the first chunk (B, 1, H, D, D), with values first.
    """
    since = steps.cumsum(-1)
    within = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", q, k, torch.exp(segsum(steps)), v)
    left = torch.exp(since[..., -1:] - since)
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", k, left, v)
    first = torch.zeros_like(states[:, :1]) if first is None else first
    states = torch.cat([first, states], dim=1)
    decay = torch.exp(segsum(F.pad(since[..., -1], (1, 0))))
    states = torch.einsum("bhzc,bchpn->bzhpn", decay, states)
    states, final = states[:, :-1], states[:, -1]
    between = torch.einsum("bclhn,bchpn,bhcl->bclhp", q, states, torch.exp(since))
    return within + between, final
