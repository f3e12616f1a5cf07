"""Parts that several layouts are made of; parameters have the names of the published weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linexport.errors import UsageError
from linexport.models import functional
from linexport.models.flash_linear_attention.base import BOUNDS, Context, LayoutSettings

L2_EPSILON = 1e-6


class ShortConvolution(nn.Module):
    """Depthwise causal convolution over tokens, (B, T, C), with its activation."""

    def __init__(self, channels: int, size: int, activation: str = "silu") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, size))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y, _ = functional.causal_conv(x.transpose(1, 2), self.weight, activation=self.activation)
        return y.transpose(1, 2)


class TokenShift(nn.Module):
    """x_{t-1} for x_t, zero for the first: a causal convolution by (1, 0), whose state is x_T."""

    weight: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        weight = torch.tensor([1.0, 0.0]).repeat(channels, 1, 1)
        self.register_buffer("weight", weight, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = functional.causal_conv(x.transpose(1, 2), self.weight)
        return y.transpose(1, 2)


class GatedRMSNorm(nn.Module):
    """rms(x) w f(g) over the last axis, f = silu or sigmoid; without a gate rms(x) w."""

    def __init__(self, width: int, eps: float, affine: bool = True, gate: str = "swish") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if affine else None
        self.width, self.eps, self.gate = width, eps, gate

    def forward(self, x: Tensor, g: Tensor | None = None) -> Tensor:
        y = F.rms_norm(x, (self.width,), self.weight, self.eps)
        if g is None:
            return y
        return y * (g.sigmoid() if self.gate == "sigmoid" else F.silu(g))


class HeadNorm(nn.Module):
    """Layer normalisation of each head of (B, T, H*d), with a weight and a bias per channel."""

    def __init__(self, heads: int, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.heads, self.eps = heads, eps

    def forward(self, x: Tensor) -> Tensor:
        split = x.unflatten(-1, (self.heads, -1))
        normal = F.layer_norm(split, split.shape[-1:], eps=self.eps).flatten(-2)
        return normal * self.weight + self.bias


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, settings: LayoutSettings) -> None:
        super().__init__()
        width = settings.intermediate_size
        if width is None:
            width = int(settings.hidden_size * (settings.hidden_ratio or 4) * 2 / 3)
            width = 256 * -(-width // 256)
        self.gate_proj = nn.Linear(settings.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(settings.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, settings.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class GatedBlock(nn.Module):
    """h = h + attn(norm(h)); h = h + mlp(norm(h))."""

    def __init__(self, settings: LayoutSettings, attn: nn.Module) -> None:
        super().__init__()
        self.attn_norm = rms_norm(settings)
        self.attn = attn
        self.mlp_norm = rms_norm(settings)
        self.mlp = GatedMLP(settings)

    def forward(self, h: Tensor, context: Context) -> Tensor:
        h = h + self.attn(context.zero_padding(self.attn_norm(h)), context)
        out: Tensor = h + self.mlp(self.mlp_norm(h))
        return out


def rms_norm(settings: LayoutSettings) -> nn.Module:
    """RMS norm of the hidden states."""
    return nn.RMSNorm(settings.hidden_size, eps=settings.norm_eps)


def low_rank(inputs: int, rank: int, outputs: int, bias: bool = False) -> nn.Sequential:
    """A product with a matrix of that rank, as two."""
    return nn.Sequential(nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=bias))


def add_projections(
    attn: nn.Module, settings: Any, activation: str = "silu", **widths: int
) -> None:
    """Give a layer ``<name>_proj`` of each width and, where it has them, ``<name>_conv1d``."""
    for name, width in widths.items():
        setattr(attn, f"{name}_proj", nn.Linear(settings.hidden_size, width, bias=False))
        if settings.use_short_conv:
            own = ShortConvolution(width, settings.conv_size, activation)
            setattr(attn, f"{name}_conv1d", own)


def projected(attn: object, name: str, x: Tensor) -> Tensor:
    """``<name>_proj``, and ``<name>_conv1d`` where there is one."""
    y: Tensor = getattr(attn, f"{name}_proj")(x)
    convolution = getattr(attn, f"{name}_conv1d", None)
    return y if convolution is None else convolution(y)


def activated(attn: Any, name: str, x: Tensor) -> Tensor:
    """``projected``, whose convolution has the activation that silu is where there is none."""
    y = projected(attn, name, x)
    return y if attn.settings.use_short_conv else F.silu(y)


def bounded_gate(x: Tensor, context: Context, index: int) -> tuple[Tensor, Tensor]:
    """Return log(l + (1 - l) sigmoid(x)) and (1 - l) sigmoid(-x), with l = 0 in the first layer.

    Args:
        x: (B, T, width).
        context: with the lower bounds l of all layers, if the model has such.
        index: of the layer.
    """
    bounds = context.shared.get(BOUNDS)
    if bounds is None or index == 0:
        return -F.softplus(-x), x.neg().sigmoid()
    rest = 1 - bounds[index]
    return torch.log(bounds[index] + rest * x.sigmoid()), rest * x.neg().sigmoid()


def scaled_heads(x: Tensor, factor: Tensor) -> Tensor:
    """Return each head of x (B, T, H*d) times its factor, (H) or (B, T, H)."""
    return (x.unflatten(-1, (factor.shape[-1], -1)) * factor[..., None]).flatten(-2)


def repeated_heads(x: Tensor, heads: int, to: int) -> Tensor:
    """Return heads of (B, T, heads*d) for groups of values: (B, T, to*d), copies side by side."""
    return x.unflatten(-1, (heads, -1)).repeat_interleave(to // heads, -2).flatten(-2)


def gated_output(attn: Any, norm: nn.Module, o: Tensor, x: Tensor, heads: int) -> Tensor:
    """``o_proj`` of the normalised heads of o (B, T, H*d), gated where there is a ``g_proj``."""
    gate = getattr(attn, "g_proj", None)
    g = None if gate is None else gate(x).unflatten(-1, (heads, -1))
    y: Tensor = attn.o_proj(norm(o.unflatten(-1, (heads, -1)), g).flatten(-2))
    return y


def l2_norm(x: Tensor, heads: int) -> Tensor:
    """x / sqrt(|x|^2 + eps) of each head of (B, T, H*d)."""
    split = x.unflatten(-1, (heads, -1))
    return (split * torch.rsqrt(split.square().sum(-1, keepdim=True) + L2_EPSILON)).flatten(-2)


def expanded_width(size: float, what: str) -> int:
    """A width that an expansion ratio gives.

    Raises:
        UsageError: it is not an integer.
    """
    if round(size) < 1 or abs(size - round(size)) > 1e-5 * size:
        raise UsageError(f"The configuration gives {what} = {size}; expected a positive integer.")
    return round(size)
