"""Activations of fla, and rotary positions.

swish x sigmoid(x)    swiglu swish(x) y    elu_p1 elu(x) + 1    logsigmoid log(sigmoid(x)) / n
rotary (x1 cos - x2 sin, x2 cos + x1 sin) of the halves of x, or of its even and odd channels
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from linexport.errors import UnsupportedModelError
from linexport.patches.gpu_kernels import GpuKernel
from linexport.patches.gpu_kernels.packed import refuse_packed


def swish(x: Tensor) -> Tensor:
    """Stand in for ``swish``."""
    return F.silu(x)


def sigmoid(x: Tensor) -> Tensor:
    """Stand in for ``sigmoid``."""
    return x.sigmoid()


def logsigmoid(x: Tensor, temperature: float = 1.0) -> Tensor:
    """Stand in for ``logsigmoid``."""
    return F.logsigmoid(x) / temperature


def elu_p1(x: Tensor) -> Tensor:
    """Stand in for ``elu_p1``."""
    return F.elu(x) + 1.0


def sqrelu(x: Tensor) -> Tensor:
    """Stand in for ``sqrelu``."""
    return F.relu(x).square()


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """Stand in for ``swiglu``."""
    return F.silu(x) * y


def sigmoidglu(x: Tensor, y: Tensor) -> Tensor:
    """Stand in for ``sigmoidglu``."""
    return x.sigmoid() * y


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Stand in for ``swiglu_linear``."""
    return F.linear(F.silu(x) * y, weight, bias)


def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: object = 0,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Stand in for ``rotary_embedding`` of x (B, T, H, D), with tables (positions, R / 2)."""
    refuse_packed(cu_seqlens)
    if not isinstance(seqlen_offsets, int):
        raise UnsupportedModelError(
            "rotary_embedding of fla is called with an offset for each sequence. Give the model "
            "whole sequences: the artifact carries its states itself."
        )
    tokens, width = x.shape[1], cos.shape[-1]
    cos, sin = (y[seqlen_offsets : seqlen_offsets + tokens, None].to(x.dtype) for y in (cos, sin))
    turned, rest = x[..., : 2 * width], x[..., 2 * width :]
    if interleaved:
        first, second = turned[..., ::2], turned[..., 1::2]
        pairs = (first * cos - second * sin, second * cos + first * sin)
        found = torch.stack(pairs, -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        found = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return torch.cat([found, rest], -1)


FLA = ("fla",)
KERNELS = (
    GpuKernel(FLA, ("swish",), swish, "x sigmoid(x)"),
    GpuKernel(FLA, ("sigmoid",), sigmoid, "sigmoid(x)"),
    GpuKernel(FLA, ("logsigmoid",), logsigmoid, "log(sigmoid(x)) / n"),
    GpuKernel(FLA, ("elu_p1",), elu_p1, "elu(x) + 1"),
    GpuKernel(FLA, ("sqrelu",), sqrelu, "relu(x)^2"),
    GpuKernel(FLA, ("swiglu",), swiglu, "x sigmoid(x) y"),
    GpuKernel(FLA, ("sigmoidglu",), sigmoidglu, "sigmoid(x) y"),
    GpuKernel(FLA, ("swiglu_linear",), swiglu_linear, "a linear layer of x sigmoid(x) y"),
    GpuKernel(
        FLA,
        ("rotary_embedding",),
        rotary_embedding,
        "rotary positions",
    ),
)
