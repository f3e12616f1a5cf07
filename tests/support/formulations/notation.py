"""Formulations: how they are registered, their shapes, and the usual pieces of one.

Every module takes ``(B, T, WIDTH)`` tensors: one, which it projects, or query, key and value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

HEADS, D = 4, 8
WIDTH = HEADS * D
EPS = 1e-6
LONGEST = 256
"""Length of the masks that are stored."""


@dataclass(frozen=True)
class Formulation:
    """A module as people write it, and what must come of it.

    Attributes:
        build: makes the module.
        inputs: 3 for query, key and value, 1 for a module that projects.
        expected: what the records of its matches say.
        nodes: how many matches there are.
        length: at which it is exported.
        streams: whether a sequence may be given in pieces.
        reason: a part of the message with which it is refused; empty where it is fused.
        half: whether half precision is part of it.
        branches: of a condition; all of them are computed once they are fused.
    """

    build: Callable[[], nn.Module]
    inputs: int = 3
    expected: dict[str, Any] = field(default_factory=dict)
    nodes: int = 1
    length: int = 16
    streams: bool = True
    reason: str = ""
    half: bool = False
    branches: int = 1


CAUSAL: dict[str, Formulation] = {}
BIDIRECTIONAL: dict[str, Formulation] = {}
OTHER: dict[str, Formulation] = {}
SEPARATE: dict[str, Formulation] = {}
COLLECTED: dict[str, Formulation] = {}
Function = Callable[..., Tensor]


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        """What the function says."""
        return self.function(*inputs)


def formulation(
    table: dict[str, Formulation],
    inputs: int = 3,
    nodes: int = 1,
    length: int = 16,
    streams: bool = True,
    reason: str = "",
    half: bool = False,
    branches: int = 1,
    **expected: Any,
) -> Callable[[Any], Any]:
    """Register a function of query, key and value, or a module class."""

    def register(written: Any) -> Any:
        build = written if isinstance(written, type) else lambda: Call(written)
        table[written.__name__.lower()] = Formulation(
            build, inputs, expected, nodes, length, streams, reason, half, branches
        )
        return written

    return register


def phi(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def split(x: Tensor) -> Tensor:
    """(B, T, H, d)."""
    return x.unflatten(-1, (HEADS, -1))


def heads_first(x: Tensor) -> Tensor:
    """(B, H, T, d)."""
    return split(x).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """(B, H, T, d) packed."""
    return x.transpose(1, 2).flatten(2)


ELU = {"query_map": "elu1", "key_map": "elu1"}
NORMALISED = {"normalize": True, "eps": EPS, **ELU}


def of_scores(q, k, v):
    """Normalised causal attention of features."""
    scores = (q @ k.transpose(-1, -2)).tril()
    return merge(scores @ v / (scores.sum(-1, keepdim=True) + EPS))


def both(kind: str) -> dict[str, Any]:
    return {"normalize": True, "query_map": kind, "key_map": kind}


def taylor_kernel(t: Tensor) -> Tensor:
    return 1 + t + t * t / 2


def products(q: Tensor, k: Tensor) -> Tensor:
    """(B, H, T, T)."""
    return heads_first(q) @ heads_first(k).transpose(-1, -2)


def over_sum(weights: Tensor, v: Tensor) -> Tensor:
    """Weights of every key over their sum."""
    return merge(weights @ heads_first(v) / (weights.sum(-1, keepdim=True) + EPS))


PLAIN = {"normalize": False}
