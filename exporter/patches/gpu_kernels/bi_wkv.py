"""The extension of Vision-RWKV that code compiles itself: an average over tokens on both sides.

    y_t = sum_s a(t, s) v_s / (sum_s a(t, s) + EPS e^(the largest key))

    a(t, s) = e^(k_s - w (t - s - 1))     s < t in one part of the tokens
              e^(k_s - w (t - s))         s < t in two
              e^(u + k_t)                 s = t
              e^(k_s - w (s - t))         s > t
    and       (1 - e^w) e^(k_s + w (t - s)) more for s <= t that is not the first of t's part

w, u (C,), k, v, y (B, T, C); parts are of ceil(T / 32) tokens. This is what the kernel computes
(github.com/OpenGVLab/Vision-RWKV). Duan et al. 2024 (arXiv:2403.02308, section 3.2) write other
exponents of w, which differ by one and are divided by T.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linexport.patches.gpu_kernels import GpuKernel
from linexport.patches.gpu_kernels.recurrences import linear

PARTS, EPS = 32, 1e-6

LINES = (
    "no=max(o1+w,k[ii2]+w);",
    "c=e1*c-e3*v[ii2];",
    "y[ii]=(c*e1+a*e2+e3*v[ii])/(d*e1+b*e2+e3+EPS);",
    "exp_w=_t+_tokenLength-ni;",
)
"""Lines of the recurrence in the kernel's source, without spaces."""

SPLITS = ("#defineTOKEN_SPLIT32", "#defineCHANNEL_SPLIT(512/32)")
"""Lines of which a source has one, where it has ``PARTS`` parts."""


def is_source(text: str) -> bool:
    """Return whether a source without spaces has the recurrence above, in as many parts."""
    return all(line in text for line in LINES) and any(line in text for line in SPLITS)


def bi_wkv_forward(w: Tensor, u: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Stand in for ``bi_wkv_forward``.

    Exponents are relative to the largest key of a channel, which every token sees.
    """
    tokens = k.shape[1]
    largest = k.amax(1, keepdim=True)
    weight, own = torch.exp(k - largest), torch.exp(u + k - largest)
    both = torch.cat([weight * v, weight], -1)
    decay, single = w.repeat(2), torch.cat([own * v, own], -1)
    length = (tokens + PARTS - 1) // PARTS
    at = torch.arange(tokens, device=k.device)
    first = at // length * length
    place = (at - first).to(k.dtype)[:, None]
    one = torch.ones_like(both[..., :1, None])
    ahead = torch.cat([both, both.flip(1)], -1)
    rate = -torch.cat([decay, decay]).expand_as(ahead)
    sums, _ = linear(one, one, ahead[..., None], rate, 1.0)
    past, rest = sums[..., 0].chunk(2, -1)
    seen = torch.exp(-decay) * (_before(past) + _before(rest).flip(1))
    # Sums over the tokens of a part are differences of sums over all: the first of them, too, are
    # of one sign, and what is left of rounding is multiplied by about w, which is divided by T.
    grown = torch.exp(decay * place) * both
    inside = grown.cumsum(1) - grown
    inside = torch.exp(-decay * (place - 1)) * (inside - inside.index_select(1, first))
    shrunk = (torch.exp(-decay * place) * both).cumsum(1)
    more = torch.exp(decay * place) * (shrunk - shrunk.index_select(1, first))
    total = seen - torch.expm1(-decay) * inside - torch.expm1(decay) * more + single
    numerator, denominator = total.chunk(2, -1)
    return numerator / (denominator + EPS * torch.clamp(own, min=1.0))


def forward(B: int, T: int, C: int, w: Tensor, u: Tensor, k: Tensor, v: Tensor, y: Tensor) -> None:
    """Stand in for ``forward``, which writes y."""
    y.copy_(bi_wkv_forward(w, u, k, v))


def _before(x: Tensor) -> Tensor:
    """Return x_{t-1} for x_t of (B, T, C), zero for the first."""
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


AVERAGE = "the average of Vision-RWKV over tokens on both sides, weighted by e^(k - decay)"

KERNEL = GpuKernel(("wkv of Vision-RWKV",), ("forward",), forward, AVERAGE)
RETURNED = GpuKernel(("wkv of Vision-RWKV",), ("bi_wkv_forward",), bi_wkv_forward, AVERAGE)
KERNELS = (KERNEL, RETURNED)
