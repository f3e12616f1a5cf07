"""Diagonal state spaces with constant rates -> ``LinearAttention``, gated.

    h_t = r exp(i w) h_{t-1} + u_t    is    h_t = exp(i w t) sum_{s <= t} r^(t-s) exp(-i w s) u_s

one number a channel, with r and w constant: real and imaginary part are two values of one head.
Angles w t are computed in float64, since t is large.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linexport.errors import UnsupportedModelError
from linexport.patches.heads_first import linear_attention
from linexport.patches.packages import Function
from linexport.system.untyped import LibraryObject

Complex = tuple[Tensor, Tensor]
"""Real and imaginary part."""


def _recurrence(log_rate: Tensor, angle: Tensor, real: Tensor, imaginary: Tensor) -> Complex:
    """Return h (B, T, N) of u (B, T, N) with rates (N,)."""
    time = torch.arange(real.shape[1]).to(torch.float64)[:, None]
    turned = time * angle.to(torch.float64)
    cos, sin = turned.cos().to(real.dtype), turned.sin().to(real.dtype)
    values = torch.stack([real * cos + imaginary * sin, imaginary * cos - real * sin], -1)
    values = values.transpose(1, 2)
    one = torch.ones_like(values[..., :1])
    decay = log_rate[:, None].expand(values.shape[:3])
    re, im = linear_attention(one, one, values, decay).transpose(1, 2).unbind(-1)
    return re * cos - im * sin, re * sin + im * cos


def _unit(self: LibraryObject, input: Tensor, state: Tensor | None = None) -> Tensor:
    """Stands in for ``LRU.forward``, a loop over batch and tokens."""
    if state is not None or input.dim() != 3:
        raise UnsupportedModelError(
            f"An LRU is given a state, or an input of {input.dim()} dimensions. Leave the state "
            "out, and give it (batch, tokens, features): the artifact has a state of its own."
        )
    into, out = torch.view_as_real(self.B), torch.view_as_real(self.C)
    added = [input @ (self.gamma_log.exp()[:, None] * into[..., i]).T for i in (0, 1)]
    real, imaginary = _recurrence(-self.nu_log.exp(), self.theta_log.exp(), *added)
    return real @ out[..., 0].T - imaginary @ out[..., 1].T + input @ self.D.T


def _simplified(
    self: LibraryObject,
    signal: Tensor,
    step_scale: float = 1.0,
    state: Tensor | None = None,
    return_state: bool = False,
) -> Tensor:
    """Stands in for ``S5.forward`` of s5-pytorch, a tree scan of complex numbers.

    h_t = exp(L step) h_{t-1} + (exp(L step) - 1) / L B u_t,   y_t = Re(C h_t) + D u_t
    """
    layer = self.seq
    other = layer.liquid or layer.bidir or layer.degree != 1 or layer.bcInit == "factorized"
    if other or state is not None or return_state or isinstance(step_scale, Tensor):
        raise UnsupportedModelError(
            "An S5 is liquid, bidirectional, of another degree, factorized, has steps of its own "
            "for each sequence, or takes or returns its state. linexport converts the others; the "
            "artifact has a state of its own."
        )
    step = step_scale * layer.log_step.exp()
    a, b = torch.view_as_real(layer.Lambda).unbind(-1)
    grown = torch.exp(a * step)
    c, d = grown * torch.cos(b * step) - 1, grown * torch.sin(b * step)
    size = a.square() + b.square()
    real, imaginary = ((a * c + b * d) / size, (a * d - b * c) / size)
    re, im = (signal @ layer.B[..., i].T for i in (0, 1))
    added = (re * real - im * imaginary, re * imaginary + im * real)
    re, im = _recurrence(a * step, b * step, *added)
    out = torch.view_as_real(layer.C)
    return re @ out[..., 0].T - im @ out[..., 1].T + signal * layer.D


def _averages(self: LibraryObject, x: Tensor) -> Tensor:
    """Stands in for ``MultiHeadedEMA.forward`` of Mega-pytorch, a convolution by Fourier."""
    value = torch.einsum("...d,hd->...hd", x, self.expansion)
    if self.bidirectional:
        value, later = value.chunk(2, -2)
        later = _average(later.flip(1), self.reverse_alphas, self.reverse_dampen_factors).flip(1)
    found = _average(value, self.alphas, self.dampen_factors)
    if self.bidirectional:
        found = torch.cat([found, later], -2)
    return torch.einsum("...hd,hd->...d", self.norm_heads(found), self.reduction)


def _average(x: Tensor, alphas: Tensor, damping: Tensor) -> Tensor:
    """Return a y_t = a x_t + (1 - a) d y_{t-1} of (B, T, H, d), a and d for each head."""
    kept = torch.log((1 - alphas.sigmoid()) * damping.sigmoid())
    value = (x * alphas.sigmoid()[:, None]).transpose(1, 2)
    one = torch.ones_like(value[..., :1])
    decay = kept[:, None].expand(value.shape[:3])
    return linear_attention(one, one, value, decay).transpose(1, 2)


FUNCTIONS = (
    Function("LRU_pytorch.LRU", "LRU.forward", _unit, "LRU-pytorch 0.1.3"),
    Function("s5.s5_model", "S5.forward", _simplified, "s5-pytorch 0.2.1"),
    Function(
        "mega_pytorch.mega_pytorch", "MultiHeadedEMA.forward", _averages, "Mega-pytorch 0.1.0"
    ),
)
