"""Short causal convolutions of fla and causal_conv1d, one kernel for each channel.

    y_t = f(sum_i w_i x_{t-W+1+i} + b) + r_t

x (B, T, D) of fla and (B, D, T) of causal_conv1d, w (D, W), b (D); f is silu or nothing, and r what
fla adds afterwards. fla keeps the last W inputs, causal_conv1d W - 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linexport.errors import UnsupportedModelError
from linexport.models import functional
from linexport.patches.gpu_kernels import GpuKernel, is_traced
from linexport.patches.gpu_kernels.packed import refuse_packed


def convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    past: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the convolution of (B, D, T) with what came before it (B, D, W - 1), and the next."""
    silu = activation in ("silu", "swish")
    weight = weight.reshape(weight.shape[0], -1)  # (D, 1, W) of an nn.Conv1d
    if is_traced():
        return functional.causal_conv(x, weight[:, None], bias, past, "silu" if silu else "none")
    width = weight.shape[1]
    before = x.new_zeros(*x.shape[:2], width - 1) if past is None else past
    whole = torch.cat([before.to(x.dtype), x], -1)
    y = F.conv1d(whole, weight[:, None].to(x.dtype), bias, groups=x.shape[1])
    return F.silu(y) if silu else y, whole[..., whole.shape[-1] - (width - 1) :]


def shifted(x: Tensor, past: Tensor | None = None) -> Tensor:
    """Return x_{t-1} for x_t of (B, T, D), zero or what came before for the first.

    Traced it is a convolution by (1, 0), whose state is the last token.
    """
    weight = torch.tensor([1.0, 0.0], dtype=x.dtype).expand(x.shape[-1], 2)
    y, _ = convolved(x.transpose(1, 2), weight, past=past)
    return y.transpose(1, 2)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Stand in for ``fla.modules.convolution.causal_conv1d``."""
    refuse_packed(cu_seqlens)
    x = x.flatten(2)
    past = None if initial_state is None else initial_state[..., 1:]
    inputs, width = x.transpose(1, 2), weight.shape[-1]
    y, _ = convolved(inputs, weight, bias, activation, past)
    y = y.transpose(1, 2) if residual is None else y.transpose(1, 2) + residual
    if not output_final_state:
        return y, None
    before = x.new_zeros(*inputs.shape[:2], width) if initial_state is None else initial_state
    whole = torch.cat([before, inputs], -1)
    return y, whole[..., whole.shape[-1] - width :]


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    activation: str | None = None,
) -> Any:
    """Stand in for ``causal_conv1d.causal_conv1d_fn``."""
    refuse_packed(seq_idx)
    y, last = convolved(x, weight, bias, activation, initial_states)
    return (y, last) if return_final_states else y


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
) -> Tensor:
    """Stand in for ``causal_conv1d.causal_conv1d_update``, which writes the state."""
    if cache_seqlens is not None:
        raise UnsupportedModelError(
            "causal_conv1d_update is called with cache_seqlens, places in a ring buffer. Call it "
            "without, on a state whose newest input is its last."
        )
    given = x if x.dim() == 3 else x[..., None]
    width = weight.shape[1]
    whole = torch.cat([conv_state, given], -1)
    past = whole[..., : conv_state.shape[-1]][..., conv_state.shape[-1] - (width - 1) :]
    y, _ = convolved(given, weight, bias, activation, past)
    conv_state.copy_(whole[..., whole.shape[-1] - conv_state.shape[-1] :])
    return y if x.dim() == 3 else y[..., 0]


FORMULA = "a causal convolution of each channel"
KERNELS = (
    GpuKernel(("fla",), ("causal_conv1d",), causal_conv1d, FORMULA),
    GpuKernel(
        ("causal_conv1d",),
        ("causal_conv1d_fn",),
        causal_conv1d_fn,
        FORMULA,
        "causal_conv1d_interface.causal_conv1d_ref",
    ),
    GpuKernel(("causal_conv1d",), ("causal_conv1d_update",), causal_conv1d_update, FORMULA),
)
