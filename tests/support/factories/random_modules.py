"""Random models around linear attention: ``random_modules:seed_17`` builds the one of seed 17."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "elu": lambda x: F.elu(x) + 1,
    "softplus": F.softplus,
    "sigmoid": torch.sigmoid,
    "square": lambda x: x.relu().square(),
    "exp": lambda x: x.clamp(-4, 4).exp(),
    "shifted": lambda x: x.relu() + 0.01,
    "bounded": lambda x: x.relu().clamp(max=3),
    "identity": lambda x: x,
    "unit": lambda x: F.normalize(x, dim=-1),
}
FORMS = ("cumsum", "einsum", "triangle", "where", "both ways", "both ways einsum", "softmax")


class Attention(nn.Module):
    """Attention of random form, map, normaliser and layout."""

    def __init__(self, random: Random, width: int) -> None:
        super().__init__()
        self.heads = random.choice((1, 2))
        self.form = random.choice(FORMS)
        self.query_map = self.key_map = random.choice(list(MAPS))
        if random.random() < 0.2:
            self.key_map = random.choice(list(MAPS))
        positive = {"identity", "unit"}.isdisjoint((self.query_map, self.key_map))
        self.normalised = positive and random.random() < 0.6
        self.eps = random.choice((1e-6, 1e-3, 1.0))
        self.scale = random.choice((1.0, 1.0, 0.5, (width // self.heads) ** -0.5))
        self.fused = random.random() < 0.5
        self.gated = random.random() < 0.25
        self.bias = random.random() < 0.5
        self.project = nn.Linear(width, 3 * width, bias=self.bias)
        self.gate = nn.Linear(width, width)
        self.out = (
            nn.Linear(width, width, bias=self.bias) if random.random() < 0.7 else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, width)."""
        b, t, width = x.shape
        if self.fused:
            parts = self.project(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            query, key, value = parts.unbind(0)
        else:
            query, key, value = (
                p.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for p in self.project(x).chunk(3, -1)
            )
        query, key = MAPS[self.query_map](query) * self.scale, MAPS[self.key_map](key)
        y = self.attend(query, key, value).transpose(1, 2).reshape(b, t, width)
        if self.gated:
            y = y * torch.sigmoid(self.gate(x))
        result: Tensor = self.out(y)
        return result

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return (B, H, T, d) from such."""
        match self.form:
            case "cumsum":
                state = (key.unsqueeze(-1) * value.unsqueeze(-2)).cumsum(2)
                y = (query.unsqueeze(-2) @ state).squeeze(-2)
                total = (query * key.cumsum(2)).sum(-1, keepdim=True)
            case "einsum":
                state = torch.einsum("bhtd,bhte->bhtde", key, value).cumsum(2)
                y = torch.einsum("bhtd,bhtde->bhte", query, state)
                total = torch.einsum("bhtd,bhtd->bht", query, key.cumsum(2)).unsqueeze(-1)
            case "triangle" | "where" | "softmax":
                scores = query @ key.transpose(-1, -2)
                size = scores.shape[-1]
                mask = torch.ones(size, size, dtype=torch.bool, device=scores.device).tril()
                if self.form == "softmax":
                    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value
                kept = scores.tril() if self.form == "triangle" else torch.where(mask, scores, 0.0)
                y, total = kept @ value, kept.sum(-1, keepdim=True)
            case "both ways":
                y = query @ (key.transpose(-1, -2) @ value)
                total = query @ key.sum(2).unsqueeze(-1)
            case _:
                # Operands are contracted in this order: another takes T times T values or more.
                y = torch.einsum("bhsd,bhse,bhtd->bhte", key, value, query)
                total = torch.einsum("bhtd,bhsd->bht", query, key).unsqueeze(-1)
        return y / (total + self.eps) if self.normalised else y


class Block(nn.Module):
    """Attention, and around it a norm, a causal convolution, a residual, a feed-forward."""

    def __init__(self, random: Random, width: int) -> None:
        super().__init__()
        norms = (nn.Identity(), nn.LayerNorm(width), nn.RMSNorm(width))
        self.norm = random.choice(norms)
        self.size = random.choice((0, 0, 3, 4))
        self.conv = nn.Conv1d(
            width, width, max(self.size, 1), groups=width, padding=max(self.size - 1, 0)
        )
        self.attention = Attention(random, width)
        self.residual = random.random() < 0.7
        self.deep = random.random() < 0.4
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 2 * width),
            random.choice((nn.GELU(), nn.SiLU(), nn.ReLU())),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, T, width)."""
        y = self.norm(x)
        if self.size:
            y = self.conv(y.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        y = self.attention(y)
        y = x + y if self.residual else y
        return y + self.feed_forward(y) if self.deep else y


def build(seed: int) -> tuple[nn.Module, tuple[Tensor, ...], tuple[dict[int, object], ...]]:
    """Return the module of a seed, with an example and dynamic length, sometimes batch.

    Tracing is most of a conversion, and slower with each block and with each dynamic dimension.
    """
    random = Random(seed)
    torch.manual_seed(seed)
    width = random.choice((4, 8, 12))
    blocks = [Block(random, width) for _ in range(random.choice((1, 1, 1, 2)))]
    dims = random.choice(({1: Dim.DYNAMIC}, {1: Dim.DYNAMIC}, {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}))
    return nn.Sequential(*blocks).eval(), (torch.randn(2, 16, width),), (dims,)


def __getattr__(name: str) -> Callable[[], object]:
    """Return the factory ``seed_<number>``."""
    if not name.startswith("seed_"):
        raise AttributeError(name)
    return lambda: build(int(name.removeprefix("seed_")))
