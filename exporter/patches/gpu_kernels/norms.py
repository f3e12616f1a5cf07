"""Norms of fla and mamba_ssm, with residuals and gates.

    layer norm  (x - mean) / sqrt(var + eps) * weight + bias       over the last axis, or in groups
    RMS norm    x / sqrt(mean(x^2) + eps) * weight + bias
    l2 norm     x / sqrt(|x|^2 + eps)

A residual is added first, and handed on where ``prenorm`` asks for it.

    8 bits      round(127 x / m) m / 127,      m the largest |x| of a token
    ternary     clamp(round(w / m), -1, 1) m,  m the mean of |w|

are how a BitLinear rounds the norm and its weights. Kernels round halves away from zero, and here
they go to the even number: a value so near a half is either within rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linexport.patches.gpu_kernels import GpuKernel
from linexport.patches.gpu_kernels.recurrences import wide


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    groups: int = 1,
) -> Tensor:
    """Return a norm of the last axis, in groups of it."""
    y = wide(x) if groups == 1 else wide(x).unflatten(-1, (groups, -1))
    if not rms:
        y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    y = y if groups == 1 else y.flatten(-2)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y.to(x.dtype)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Any:
    """Stand in for ``layer_norm`` and ``group_norm``."""
    x = x if residual is None else x + residual
    y = _norm(x, weight, bias, eps, is_rms_norm, num_groups)
    return (y, x) if prenorm else y


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
) -> Any:
    """Stand in for ``rms_norm``."""
    return layer_norm(x, weight, bias, residual, eps, prenorm, is_rms_norm=True)


def layer_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Any:
    """Stand in for ``layer_norm_linear``: a linear layer of the norm."""
    y, x = layer_norm(x, norm_weight, norm_bias, residual, eps, True, is_rms_norm, num_groups)
    y = F.linear(y, linear_weight, linear_bias)
    return (y, x) if prenorm else y


def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
) -> Any:
    """Stand in for ``rms_norm_linear``."""
    return layer_norm_linear(
        x, norm_weight, norm_bias, linear_weight, linear_bias, residual, eps, prenorm, True
    )


def _of_8_bits(x: Tensor) -> Tensor:
    scale = 127.0 / wide(x).abs().amax(-1, keepdim=True).clamp(min=1e-5)
    return ((wide(x) * scale).round().clamp(-128, 127) / scale).to(x.dtype)


def _ternary(weight: Tensor) -> Tensor:
    scale = 1.0 / weight.abs().mean().clamp(min=1e-5)
    return (weight * scale).round().clamp(-1, 1) / scale


def layer_norm_linear_quant(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Any:
    """Stand in for ``layer_norm_linear_quant``: a ternary linear layer of the norm in 8 bits."""
    y, x = layer_norm(x, norm_weight, norm_bias, residual, eps, True, is_rms_norm)
    y = F.linear(_of_8_bits(y), _ternary(linear_weight), linear_bias)
    return (y, x) if prenorm else y


def rms_norm_linear_quant(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Any:
    """Stand in for ``rms_norm_linear_quant``."""
    return layer_norm_linear_quant(
        *(x, norm_weight, norm_bias, linear_weight, linear_bias, residual, eps, prenorm),
        is_rms_norm=True,
    )


def bit_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-8,
) -> Any:
    """Stand in for ``bit_linear``."""
    return layer_norm_linear_quant(
        x, norm_weight, norm_bias, weight, bias, eps=eps, is_rms_norm=True
    )


def _gated(y: Tensor, g: Tensor, activation: str) -> Tensor:
    return y * (g.sigmoid() if activation == "sigmoid" else F.silu(g))


def layer_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    eps: float = 1e-6,
) -> Any:
    """Stand in for ``layer_norm_gated``: the norm times an activation of a gate."""
    y, x = layer_norm(x, weight, bias, residual, eps, True)
    y = _gated(y, g, activation)
    return (y, x) if prenorm else y


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    eps: float = 1e-6,
) -> Any:
    """Stand in for ``rms_norm_gated``."""
    y, x = layer_norm(x, weight, bias, residual, eps, True, is_rms_norm=True)
    y = _gated(y, g, activation)
    return (y, x) if prenorm else y


def rms_norm_swish_gate_linear(
    x: Tensor,
    g: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    prenorm: bool = False,
    eps: float = 1e-6,
) -> Any:
    """Stand in for ``rms_norm_swish_gate_linear``: a linear layer of the gated norm."""
    y, x = rms_norm_gated(x, g, norm_weight, norm_bias, "swish", residual, True, eps)
    y = F.linear(y, linear_weight, linear_bias)
    return (y, x) if prenorm else y


def layer_norm_swish_gate_linear(
    x: Tensor,
    g: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    prenorm: bool = False,
    eps: float = 1e-6,
) -> Any:
    """Stand in for ``layer_norm_swish_gate_linear``."""
    y, x = layer_norm_gated(x, g, norm_weight, norm_bias, "swish", residual, True, eps)
    y = F.linear(y, linear_weight, linear_bias)
    return (y, x) if prenorm else y


def layernorm_fn(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """Stand in for ``layernorm_fn``: norm(x) silu(z), or norm(x silu(z))."""
    groups = 1 if group_size is None else x.shape[-1] // group_size
    if z is not None and not norm_before_gate:
        return _norm(wide(x) * F.silu(wide(z)), weight, bias, eps, is_rms_norm, groups).to(x.dtype)
    y = _norm(x, weight, bias, eps, is_rms_norm, groups)
    return y if z is None else y * F.silu(z)


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """Stand in for ``rmsnorm_fn``."""
    return layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, True)


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """Stand in for ``l2norm``."""
    y = wide(x)
    y = y * torch.rsqrt(y.square().sum(-1, keepdim=True) + eps)
    return y.to(output_dtype or x.dtype)


def layer_norm_fn(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    is_rms_norm: bool = False,
    zero_centered_weight: bool = False,
) -> Any:
    """Stand in for ``layer_norm_fn`` of mamba_ssm."""
    weight = weight + 1.0 if zero_centered_weight and weight is not None else weight
    return layer_norm(x, weight, bias, residual, eps, prenorm, is_rms_norm)


def rms_norm_fn(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    zero_centered_weight: bool = False,
) -> Any:
    """Stand in for ``rms_norm_fn`` of mamba_ssm."""
    return layer_norm_fn(x, weight, bias, residual, eps, prenorm, True, zero_centered_weight)


FLA, MAMBA, BOTH = ("fla",), ("mamba_ssm",), ("fla", "mamba_ssm")
LAYER, RMS = "a layer norm", "a root mean square norm"
BITS = "in 8 bits times ternary weights"

KERNELS = (
    GpuKernel(FLA, ("layer_norm", "group_norm"), layer_norm, LAYER),
    GpuKernel(FLA, ("rms_norm",), rms_norm, RMS, "modules.layernorm.rms_norm_ref"),
    GpuKernel(FLA, ("layer_norm_linear", "group_norm_linear"), layer_norm_linear, LAYER),
    GpuKernel(FLA, ("rms_norm_linear",), rms_norm_linear, RMS),
    GpuKernel(FLA, ("layer_norm_linear_quant",), layer_norm_linear_quant, f"{LAYER} {BITS}"),
    GpuKernel(FLA, ("rms_norm_linear_quant",), rms_norm_linear_quant, f"{RMS} {BITS}"),
    GpuKernel(FLA, ("bit_linear",), bit_linear, f"{RMS} {BITS}"),
    GpuKernel(FLA, ("layer_norm_gated",), layer_norm_gated, f"{LAYER} times a gate"),
    GpuKernel(FLA, ("rms_norm_gated",), rms_norm_gated, f"{RMS} times a gate"),
    GpuKernel(FLA, ("layer_norm_swish_gate_linear",), layer_norm_swish_gate_linear, LAYER),
    GpuKernel(FLA, ("rms_norm_swish_gate_linear",), rms_norm_swish_gate_linear, RMS),
    GpuKernel(FLA, ("l2norm", "l2_norm"), l2norm, "x / sqrt(|x|^2 + eps)"),
    GpuKernel(BOTH, ("layernorm_fn",), layernorm_fn, f"{LAYER} times silu of a gate"),
    GpuKernel(BOTH, ("rmsnorm_fn",), rmsnorm_fn, f"{RMS} times silu of a gate"),
    GpuKernel(MAMBA, ("layer_norm_fn",), layer_norm_fn, LAYER),
    GpuKernel(MAMBA, ("rms_norm_fn",), rms_norm_fn, RMS),
)
