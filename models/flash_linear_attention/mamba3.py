"""Mamba-3 (Lahoti et al. 2026, arXiv 2603.15569): a trapezoid of two tokens, on keys that turn.

    h_t = a_t h_{t-1} + (1 - l_t) d_t a_t B_{t-1} x_{t-1}^T + l_t d_t B_t x_t^T
    y_t = h_t^T C_t + D x_t,   d_t = softplus(.),   a_t = e^{-d_t softplus(.)},   l_t = sigmoid(.)

with B_t and C_t turned by the angles theta_t = theta_{t-1} + pi d_t tanh(.). What a token adds to
later states is one product, so that this is gated linear attention to the tokens before:

    G_t = a_t (G_{t-1} + (l_{t-1} d_{t-1} + (1 - l_t) d_t) B_{t-1} x_{t-1}^T)
    h_t = G_t + l_t d_t B_t x_t^T

Angles are counted back from the last token of a call, as integers: the state before it is turned by
all of them, and no sum of angles is carried. With ranks (MIMO) a token has R keys, values and
queries, which are R tokens for the attention, of which the first decays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linexport.errors import UsageError
from linexport.models.flash_linear_attention.base import Context, LayoutSettings, WeightLayout
from linexport.models.flash_linear_attention.layers import (
    GatedRMSNorm,
    TokenShift,
    expanded_width,
    rms_norm,
)
from linexport.models.functional import linear_attention

TURN = 2**40
"""Parts of a turn that angles are counted in."""

Pair = tuple[Tensor, Tensor]
"""Cosines and sines."""


@dataclass(frozen=True, kw_only=True)
class Mamba3Settings(LayoutSettings):
    """LayoutSettings of ``mamba3``."""

    num_hidden_layers: int = 48
    norm_eps: float = 1e-5
    head_dim: int = 64
    state_size: int = 128
    expand: float = 2
    n_groups: int = 1
    use_bias: bool = False
    rope_fraction: float = 0.5
    A_floor: float = 1e-4
    is_outproj_norm: bool = False
    is_mimo: bool = False
    mimo_rank: int = 4


class HeadRMSNorm(nn.Module):
    """RMS norm of each head of (..., H, P), with a weight for every channel."""

    def __init__(self, heads: int, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads * width))
        self.heads, self.eps = heads, eps

    def forward(self, x: Tensor) -> Tensor:
        normal = F.rms_norm(x, x.shape[-1:], eps=self.eps)
        return normal * self.weight.unflatten(0, (self.heads, -1))


class Mamba3(nn.Module):
    """The layer above, from (B, T, hidden) to (B, T, hidden)."""

    mimo_o: Tensor

    def __init__(self, s: Mamba3Settings) -> None:
        super().__init__()
        self.settings, self.rank = s, s.mimo_rank if s.is_mimo else 1
        values = expanded_width(s.hidden_size * s.expand, "inner width")
        self.heads = heads = expanded_width(values / s.head_dim, "number of heads")
        if heads % s.n_groups or s.state_size % 2:
            raise UsageError(
                f"The configuration gives {heads} heads, n_groups = {s.n_groups} and state_size = "
                f"{s.state_size}; expected groups of as many heads each, and an even size."
            )
        keys, angles = self.rank * s.n_groups * s.state_size, int(s.state_size * s.rope_fraction)
        self.widths = [values, values, keys, keys, heads, heads, heads, angles // 2]
        self.in_proj = nn.Linear(s.hidden_size, sum(self.widths), bias=s.use_bias)
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.B_bias = nn.Parameter(torch.ones(heads, self.rank, s.state_size))
        self.C_bias = nn.Parameter(torch.ones(heads, self.rank, s.state_size))
        self.B_norm = GatedRMSNorm(s.state_size, s.norm_eps)
        self.C_norm = GatedRMSNorm(s.state_size, s.norm_eps)
        for name in ("mimo_x", "mimo_z", "mimo_o") if s.is_mimo else ():
            setattr(self, name, nn.Parameter(torch.ones(heads, self.rank, s.head_dim)))
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = HeadRMSNorm(heads, s.head_dim, s.norm_eps) if s.is_outproj_norm else None
        self.out_proj = nn.Linear(values, s.hidden_size, bias=s.use_bias)
        self.shift = TokenShift(keys + values + heads)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        gate, value, key, query, step, rate, share, angle = self.in_proj(x).split(self.widths, -1)
        value, step = context.zero_padding(value), F.softplus(step + self.dt_bias)
        decay = step * (-F.softplus(rate)).clamp(max=-self.settings.A_floor)
        now = step * share.sigmoid()
        key, query = self._normal(self.B_norm, key), self._normal(self.C_norm, query)
        before = self.shift(torch.cat([key, value, now], -1)).split(
            [key.shape[-1], value.shape[-1], now.shape[-1]], -1
        )
        weight = decay.exp() * (before[2] + step * share.neg().sigmoid())
        of_query, of_key, of_state = self._turns(step, angle, context)
        query, key = self._keys(query, self.C_bias), self._keys(key, self.B_bias)
        value = self._of_ranks(value, "mimo_x")
        y = self._attend(
            turned(query, *of_query),
            turned(self._keys(before[0], self.B_bias), *of_key),
            self._of_ranks(before[1], "mimo_x") * of_ranks(weight),
            decay,
            self._beginning(*(x.squeeze(1) for x in of_state)),
            context,
        )
        y = y + of_one_token(query, key, value * of_ranks(now))
        return self._output(y + self.D.unsqueeze(1) * value, gate)

    def _normal(self, norm: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = norm(x.unflatten(-1, (-1, self.settings.state_size)))
        return y.flatten(-2)

    def _keys(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return (B, T, R, H, N): halves side by side that turn together.

        The library turns neighbours of a head without ranks, and of ranks a half with the other.
        """
        s = self.settings
        y = x.unflatten(-1, (self.rank, s.n_groups, 1, s.state_size))
        y = (y + bias.transpose(0, 1).unflatten(1, (s.n_groups, -1))).flatten(3, 4)
        return y if s.is_mimo else y.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)

    def _of_ranks(self, x: Tensor, name: str) -> Tensor:
        """Return (B, T, R, H, P) of (B, T, H P), times the weights of ranks where there are."""
        y = x.unflatten(-1, (1, self.heads, -1))
        return y * getattr(self, name).transpose(0, 1) if self.settings.is_mimo else y

    def _turns(self, step: Tensor, angle: Tensor, context: Context) -> tuple[Pair, Pair, Pair]:
        """Return cosines and sines of the angles to come at a query, at a key and before the first.

        Those of keys count their own token; (B, T, 1, H, N/2), and (B, 1, 1, H, N/2) of the state.
        """
        turns = (step.unsqueeze(3) * (angle.tanh() / 2).unsqueeze(2)).to(
            torch.promote_types(step.dtype, torch.float32)
        )
        parts = (turns * TURN).round().to(torch.int64) * context.keep.unsqueeze(2).unsqueeze(3)
        whole = parts.sum(1, keepdim=True)
        later = whole - parts.cumsum(1)
        of_query, of_key, of_state = (
            self._cos_sin(x, step.dtype) for x in (later, later + parts, whole)
        )
        return of_query, of_key, of_state

    def _cos_sin(self, parts: Tensor, dtype: torch.dtype) -> Pair:
        """Return cosine and sine of parts of a turn (B, T, H, .), 1 and 0 where nothing turns."""
        inside = (parts + TURN // 2) % TURN - TURN // 2
        radians = inside.unsqueeze(2).to(dtype) * (2 * math.pi / TURN)
        rest = (0, self.settings.state_size // 2 - radians.shape[-1])
        return F.pad(radians.cos(), rest, value=1.0), F.pad(radians.sin(), rest)

    def _beginning(self, cos: Tensor, sin: Tensor) -> Tensor:
        """Return a state of zeros (B, H, N, P) times the turns of the tokens at hand.

        An exported model has the state that it is given in the place of the zeros.
        """
        pairs = (1, 2, cos.shape[-1], self.settings.head_dim)
        zeros = cos.new_zeros(cos.shape[0], self.heads, *pairs)
        matrix = torch.stack([cos, sin, -sin, cos], -2).flatten(1, 2).unflatten(-2, (2, 2))
        return (matrix.unsqueeze(-1) * zeros).sum(3).flatten(2, 3)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, past: Tensor, c: Context
    ) -> Tensor:
        """Return what all keys of the tokens before give each query, (B, T, R, H, P)."""
        first = F.pad(decay.unsqueeze(2), (0, 0, 0, self.rank - 1))
        q, k, v = (x.flatten(1, 2).flatten(2) for x in (query, key, value))
        o, _, _ = linear_attention(
            q,
            k,
            v,
            past_state=past,
            decay=first.flatten(1, 2),
            key_mask=c.keep.repeat_interleave(self.rank, 1),
            q_num_heads=self.heads,
            kv_num_heads=self.heads,
            update_rule="gated",
        )
        y = o.unflatten(1, (-1, self.rank)).unflatten(-1, (self.heads, -1))
        # The attention has read a rank before it wrote the ranks behind.
        return y if self.rank == 1 else y + of_one_token(query, key, value, behind=True)

    def _output(self, y: Tensor, gate: Tensor) -> Tensor:
        if self.norm is not None:
            y = self.norm(y)
        y = y * F.silu(self._of_ranks(gate, "mimo_z"))
        if self.settings.is_mimo:
            y = y * self.mimo_o.transpose(0, 1)
        out: Tensor = self.out_proj(y.sum(2).flatten(-2))
        return out


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x (..., N) with each pair of channels (i, i + N/2) turned back by an angle."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)


def of_ranks(x: Tensor) -> Tensor:
    """Return a number for each head, (B, T, H), as (B, T, 1, H, 1)."""
    return x.unsqueeze(2).unsqueeze(4)


def of_one_token(query: Tensor, key: Tensor, value: Tensor, behind: bool = False) -> Tensor:
    """Return what the ranks of a token give each rank of it, or those behind a rank alone."""
    ranks = torch.arange(key.shape[2], device=key.device).reshape(-1, 1, 1)

    # Products and sums: the few ranks of a token are no sequence to attend to.
    def given(rank: int) -> Tensor:
        score = (query * key.narrow(2, rank, 1)).sum(-1, keepdim=True)
        score = torch.where(ranks < rank, score, 0.0) if behind else score
        return score * value.narrow(2, rank, 1)

    return reduce(torch.add, map(given, range(key.shape[2])))


class Mamba3Block(nn.Module):
    """h = h + mixer(norm(h))."""

    def __init__(self, settings: Mamba3Settings) -> None:
        super().__init__()
        self.norm = rms_norm(settings)
        self.mixer = Mamba3(settings)

    def forward(self, h: Tensor, context: Context) -> Tensor:
        out: Tensor = h + self.mixer(context.zero_padding(self.norm(h)), context)
        return out


LAYOUT = WeightLayout(
    "mamba3",
    "Mamba3ForCausalLM",
    Mamba3Settings,
    lambda settings, index: Mamba3Block(settings),
    rms_norm,
    {"rope_fraction": (0.5, 1.0)},
    stack="backbone",
    last_norm="norm_f",
)
