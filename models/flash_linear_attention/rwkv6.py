"""RWKV-6 (Peng et al. 2024, arXiv 2404.05892): the newest token is a bonus term.

    o_t = (S_{t-1} + diag(u) k_t v_t^T)^T r_t,   S_t = diag(w_t) S_{t-1} + k_t v_t^T

The gated rule reads after it writes. With key, value and decay one step late its state is S_{t-1},
and the newest token is added outside: o_t = S_{t-1}^T r_t + (r_t . (u * k_t)) v_t.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linexport.models.flash_linear_attention.base import Context, WeightLayout
from linexport.models.flash_linear_attention.layers import HeadNorm, TokenShift, expanded_width
from linexport.models.flash_linear_attention.rwkv import LoRA, RWKVBlock, RWKVSettings, layer_norm
from linexport.models.functional import linear_attention

MIXED = 5
"""Projections with a mix of their own of a token and the one before: r, w, k, v, g."""


@dataclass(frozen=True, kw_only=True)
class RWKV6Settings(RWKVSettings):
    """Settings of ``rwkv6``."""

    expand_k: float = 0.5
    expand_v: float = 1.0
    hidden_ratio: float | None = 3.5
    num_heads: int = 4
    proj_low_rank_dim: int = 32
    gate_low_rank_dim: int = 64


class Mixed(nn.Module):
    """A projection of x + delta * mu, with a mu of its own or one given."""

    def __init__(self, linear: nn.Module, width: int | None = None) -> None:
        super().__init__()
        self.linear = linear
        if width is not None:
            self.mu = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, delta: Tensor, mu: Tensor | None = None) -> Tensor:
        y: Tensor = self.linear(x + delta * (self.mu if mu is None else mu))
        return y


class RWKV6Attention(nn.Module):
    """The layer above, from (B, T, hidden) to (B, T, hidden)."""

    def __init__(self, s: RWKV6Settings) -> None:
        super().__init__()
        self.settings, hidden, rank = s, s.hidden_size, s.proj_low_rank_dim
        keys = expanded_width(hidden * s.expand_k, "key width")
        values = expanded_width(hidden * s.expand_v, "value width")
        self.x_proj = nn.Sequential(
            Mixed(nn.Linear(hidden, MIXED * rank, bias=False), hidden),
            nn.Tanh(),
            nn.Linear(MIXED * rank, hidden, bias=False),
        )
        self.x_bias = nn.Parameter(torch.zeros(MIXED, hidden))
        self.r_proj = Mixed(nn.Linear(hidden, keys, bias=False))
        self.w_proj = Mixed(LoRA(hidden, keys, s.gate_low_rank_dim, nn.Tanh()))
        self.k_proj = Mixed(nn.Linear(hidden, keys, bias=False))
        self.v_proj = Mixed(nn.Linear(hidden, values, bias=False))
        self.g_proj = Mixed(nn.Linear(hidden, values, bias=False))
        self.bonus = nn.Parameter(torch.zeros(s.num_heads, keys // s.num_heads))
        self.g_norm = HeadNorm(s.num_heads, values, s.norm_eps)
        self.o_proj = nn.Linear(values, hidden, bias=False)
        self.shift, self.shift_kvw = TokenShift(hidden), TokenShift(2 * keys + values)
        self.widths = (keys, values, keys)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        heads, delta = self.settings.num_heads, self.shift(x) - x
        mixes = self._mixes(x, delta)
        projections = (self.r_proj, self.w_proj, self.k_proj, self.v_proj, self.g_proj)
        r, w, k, v, g = (p(x, delta, mu) for p, mu in zip(projections, mixes, strict=True))
        v = context.zero_padding(v)
        late_k, late_v, late_w = self.shift_kvw(torch.cat([k, v, w], -1)).split(self.widths, -1)
        before, _, _ = linear_attention(
            r,
            late_k,
            late_v,
            # Of nothing before the first token the decay is e^-1 instead of 1: of a zero state.
            decay=-late_w.exp(),
            q_num_heads=heads,
            kv_num_heads=heads,
            update_rule="gated",
        )
        r, k, v = (y.unflatten(-1, (heads, -1)) for y in (r, k, v))
        newest = (r * self.bonus * k).sum(-1, keepdim=True) * v
        o = self.g_norm(before + newest.flatten(-2))
        out: Tensor = self.o_proj(o * F.silu(g))
        return out

    def _mixes(self, x: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
        """A mix per projection and channel, from a low-rank projection of the token itself."""
        mixed, activate, expand = self.x_proj
        ranks = activate(mixed(x, delta)).unflatten(-1, (MIXED, -1))
        assert isinstance(expand, nn.Linear)
        weights = expand.weight.unflatten(-1, (MIXED, -1)).permute(1, 2, 0)
        return tuple(ranks[:, :, i] @ weights[i] + self.x_bias[i] for i in range(MIXED))


class RWKV6FeedForward(nn.Module):
    """sigmoid(receptance) * value(relu(key)^2), each of a mix with the token before."""

    def __init__(self, s: RWKV6Settings) -> None:
        super().__init__()
        hidden, width = s.hidden_size, s.feed_forward_width(3.5)
        self.key = Mixed(nn.Linear(hidden, width, bias=False), hidden)
        self.value = nn.Linear(width, hidden, bias=False)
        self.receptance = Mixed(nn.Linear(hidden, hidden, bias=False), hidden)
        self.shift = TokenShift(hidden)

    def forward(self, x: Tensor) -> Tensor:
        delta = self.shift(x) - x
        value = self.value(F.relu(self.key(x, delta)).square())
        out: Tensor = self.receptance(x, delta).sigmoid() * value
        return out


LAYOUT = WeightLayout(
    "rwkv6",
    "RWKV6ForCausalLM",
    RWKV6Settings,
    lambda settings, index: RWKVBlock(
        settings, index, RWKV6Attention(settings), RWKV6FeedForward(settings)
    ),
    layer_norm,
    {"hidden_act": ("sqrelu",)},
)
