"""RWKV-7 (Peng et al. 2025, arXiv 2503.14456): the generalised delta rule.

    S_t = diag(e^{w_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T,   o_t = S_t^T r_t
    a_t = -kappa_t,   b_t = kappa_t * eta_t,   kappa_t of norm 1 along k_t * k_k
    w_t = -e^{-1/2} sigmoid(...)

Values of later layers are mixed with those of the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linexport.errors import UnsupportedModelError
from linexport.models.flash_linear_attention.base import Context, WeightLayout
from linexport.models.flash_linear_attention.layers import HeadNorm, TokenShift, l2_norm
from linexport.models.flash_linear_attention.rwkv import LoRA, RWKVBlock, RWKVSettings, layer_norm
from linexport.models.functional import generalized_delta_rule

STRONGEST_DECAY = -0.6065306597126334
"""-e^{-1/2}."""

FIRST_VALUE = "first_value"


@dataclass(frozen=True, kw_only=True)
class RWKV7Settings(RWKVSettings):
    """Settings of ``rwkv7``."""

    head_dim: int | None = 64
    num_heads: int | None = None
    decay_low_rank_dim: int = 64
    gate_low_rank_dim: int = 128
    a_low_rank_dim: int = 64
    v_low_rank_dim: int = 16


class RWKV7Attention(nn.Module):
    """The layer above, from (B, T, hidden) to (B, T, hidden)."""

    def __init__(self, s: RWKV7Settings, index: int) -> None:
        super().__init__()
        hidden = s.hidden_size
        if s.head_dim is None and s.num_heads is None:
            raise UnsupportedModelError("rwkv7 without head_dim and num_heads is not defined.")
        width = s.head_dim or hidden // (s.num_heads or 1)
        self.heads, self.fuse_norm = hidden // width, s.fuse_norm
        for name in "rwkvag":
            self.register_parameter(f"x_{name}", nn.Parameter(torch.zeros(1, 1, hidden)))
        self.k_k = nn.Parameter(torch.zeros(hidden))
        self.k_a = nn.Parameter(torch.zeros(hidden))
        self.r_k = nn.Parameter(torch.zeros(self.heads, width))
        self.r_proj = nn.Linear(hidden, hidden, bias=False)
        self.k_proj = nn.Linear(hidden, hidden, bias=False)
        self.v_proj = nn.Linear(hidden, hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)
        self.w_lora = LoRA(hidden, hidden, s.decay_low_rank_dim, nn.Tanh())
        self.v_lora = LoRA(hidden, hidden, s.v_low_rank_dim, nn.Identity()) if index else None
        self.a_lora = LoRA(hidden, hidden, s.a_low_rank_dim, nn.Identity())
        self.g_lora = LoRA(hidden, hidden, s.gate_low_rank_dim, nn.Sigmoid(), bias=False)
        self.g_norm = HeadNorm(self.heads, hidden, width * s.norm_eps)
        self.shift = TokenShift(hidden)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        delta = self.shift(x) - x
        mixed = {name: x + delta * getattr(self, f"x_{name}") for name in "rwkvag"}
        r, k = self.r_proj(mixed["r"]), self.k_proj(mixed["k"])
        w = STRONGEST_DECAY * self.w_lora(mixed["w"]).sigmoid()
        rate, gate = self.a_lora(mixed["a"]).sigmoid(), self.g_lora(mixed["g"])
        v = self._value(mixed["v"], context)
        kappa = self._removal_key(k)
        k = k + k * (rate - 1) * self.k_a
        v = context.zero_padding(v)
        o, _ = generalized_delta_rule(r, k, v, w, -kappa, kappa * rate, num_heads=self.heads)
        r, k, v = (y.unflatten(-1, (self.heads, -1)) for y in (r, k, v))
        bonus = (r * k * self.r_k).sum(-1, keepdim=True) * v
        out: Tensor = self.o_proj((self.g_norm(o) + bonus.flatten(-2)) * gate)
        return out

    def _value(self, x: Tensor, context: Context) -> Tensor:
        v: Tensor = self.v_proj(x)
        if self.v_lora is None:
            context.shared[FIRST_VALUE] = v
            return v
        return torch.lerp(v, context.shared[FIRST_VALUE], self.v_lora(x).sigmoid())

    def _removal_key(self, k: Tensor) -> Tensor:
        """Key of the removed value, of norm 1 per head; the two norms differ in their epsilon."""
        scaled = k * self.k_k
        if self.fuse_norm:
            return l2_norm(scaled, self.heads)
        return F.normalize(scaled.unflatten(-1, (self.heads, -1)), dim=-1).flatten(-2)


class RWKV7FeedForward(nn.Module):
    """value(relu(key(mix of a token and the one before))^2)."""

    def __init__(self, s: RWKV7Settings) -> None:
        super().__init__()
        width = s.feed_forward_width(4)
        self.x_k = nn.Parameter(torch.zeros(s.hidden_size))
        self.key = nn.Linear(s.hidden_size, width, bias=False)
        self.value = nn.Linear(width, s.hidden_size, bias=False)
        self.shift = TokenShift(s.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        mixed = x + (self.shift(x) - x) * self.x_k
        out: Tensor = self.value(F.relu(self.key(mixed)).square())
        return out


LAYOUT = WeightLayout(
    "rwkv7",
    "RWKV7ForCausalLM",
    RWKV7Settings,
    lambda settings, index: RWKVBlock(
        settings, index, RWKV7Attention(settings, index), RWKV7FeedForward(settings)
    ),
    layer_norm,
    {"hidden_act": ("sqrelu",)},
)
