"""Selective scans of mamba_ssm and of extensions for them.

    delta_t = softplus(dt_t + bias)                                    per channel, or per head
    S_t = exp(delta_t A) S_{t-1} + B_t (delta_t x_t)^T,   y_t = S_t^T C_t + D x_t,   y_t silu(z_t)

Mamba: x and dt (B, D, T), A (D, N), B and C (B, N, T) or (B, G, N, T) for groups of channels.
Mamba-2: x (B, T, H, P), dt (B, T, H), A (H), B and C (B, T, G, N); its state is S^T, (B, H, P, N).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linexport.patches import mamba1
from linexport.patches.gpu_kernels import GpuKernel, compare, is_traced
from linexport.patches.gpu_kernels.convolutions import convolved
from linexport.patches.gpu_kernels.norms import layernorm_fn
from linexport.patches.gpu_kernels.packed import refuse_packed
from linexport.patches.gpu_kernels.recurrences import linear, wide


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """Stand in for ``selective_scan_fn``."""
    mamba1.refuse_fixed(A, B, C)
    if is_traced():
        return mamba1.of_package(
            u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state
        )
    x, dt, A = wide(u), wide(delta), wide(A)
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[:, None]
    dt = F.softplus(dt) if delta_softplus else dt
    B, C = (_of_channels(wide(y), x.shape[1]) for y in (B, C))
    S = x.new_zeros(x.shape[0], *A.shape)
    outputs = []
    for t in range(x.shape[2]):
        step = dt[..., t, None]
        S = torch.exp(step * A) * S + step * x[..., t, None] * B[..., t]
        outputs.append((S * C[..., t]).sum(-1))
    y = torch.stack(outputs, -1)
    y = y if D is None else y + x * D.to(x.dtype)[:, None]
    y = (y if z is None else y * F.silu(wide(z))).to(u.dtype)
    return (y, S) if return_last_state else y


def _of_channels(x: Tensor, channels: int) -> Tensor:
    """Return (B, D, N, T) of (B, N, T), or of (B, G, N, T) with a row for each group."""
    x = x[:, None] if x.dim() == 3 else x
    return x.repeat_interleave(channels // x.shape[1], 1)


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Tensor:
    """Stand in for ``mamba_inner_fn``: a whole block of Mamba behind its first projection."""
    y = mamba_inner_fn_no_out_proj(
        xz,
        conv1d_weight,
        conv1d_bias,
        x_proj_weight,
        delta_proj_weight,
        A,
        B,
        C,
        D,
        delta_bias,
        B_proj_bias,
        C_proj_bias,
        delta_softplus,
        b_rms_weight,
        c_rms_weight,
        dt_rms_weight,
        b_c_dt_rms_eps,
    )
    return F.linear(y.transpose(1, 2), out_proj_weight, out_proj_bias)


def mamba_inner_fn_no_out_proj(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Tensor:
    """Stand in for ``mamba_inner_fn_no_out_proj`` of Vim: (B, D, T) before the last projection."""
    x, z = xz.chunk(2, 1)
    x, _ = convolved(x, conv1d_weight, conv1d_bias, "silu")
    rank, states = delta_proj_weight.shape[1], A.shape[1]
    dt, rest = F.linear(x.transpose(1, 2), x_proj_weight).split(
        [rank, x_proj_weight.shape[0] - rank], -1
    )
    first, last = rest[..., :states], rest[..., rest.shape[-1] - states :]
    first = first if B_proj_bias is None else first + B_proj_bias
    last = last if C_proj_bias is None else last + C_proj_bias
    first, last, dt = (
        y if weight is None else layernorm_fn(y, weight, eps=b_c_dt_rms_eps, is_rms_norm=True)
        for y, weight in ((first, b_rms_weight), (last, c_rms_weight), (dt, dt_rms_weight))
    )
    found: Tensor = selective_scan_fn(
        x,
        F.linear(dt, delta_proj_weight).transpose(1, 2),
        A,
        first.transpose(1, 2) if B is None else B,
        last.transpose(1, 2) if C is None else C,
        D,
        z,
        delta_bias,
        delta_softplus,
    )
    return found


def bimamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    A_b: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
) -> Tensor:
    """Stand in for ``bimamba_inner_fn`` of Vim: one convolution, and a scan in each direction."""
    x, z = xz.chunk(2, 1)
    x, _ = convolved(x, conv1d_weight, conv1d_bias, "silu")
    rank, states = delta_proj_weight.shape[1], A.shape[1]
    dt, first, last = F.linear(x.transpose(1, 2), x_proj_weight).split([rank, states, states], -1)
    first = first if B_proj_bias is None else first + B_proj_bias
    last = last if C_proj_bias is None else last + C_proj_bias
    delta = F.linear(dt, delta_proj_weight).transpose(1, 2)
    B = first.transpose(1, 2) if B is None else B
    C = last.transpose(1, 2) if C is None else C
    given = (x, delta, B, C, z)
    ahead = selective_scan_fn(x, delta, A, B, C, D, z, delta_bias, delta_softplus)
    x, delta, B, C, z = (y.flip(-1) for y in given)
    back = selective_scan_fn(x, delta, A_b, B, C, D, z, delta_bias, delta_softplus)
    y = ahead + back.flip(-1)
    return F.linear(y.transpose(1, 2), out_proj_weight, out_proj_bias)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 0,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
) -> Any:
    """Stand in for ``mamba_chunk_scan_combined``."""
    refuse_packed(seq_idx)
    refuse_packed(cu_seqlens)
    wide_x, delta = wide(x), wide(dt)
    delta = delta if dt_bias is None else delta + dt_bias
    delta = F.softplus(delta) if dt_softplus else delta
    low, high = dt_limit
    if high < math.inf or low > 0 or not dt_softplus:  # softplus is positive
        delta = delta.clamp(min=low, max=high)
    state = None if initial_states is None else initial_states.transpose(-1, -2)
    y, last = linear(C, B, wide_x * delta[..., None], wide(A) * delta, 1.0, state)
    if D is not None:
        y = y + (D if D.dim() == 2 else D[:, None]) * wide_x
    if z is not None:
        y = y * F.silu(wide(z))
    y = y.to(x.dtype)
    compare_scan(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, y)
    return (y, last.transpose(-1, -2)) if return_final_states else y


def compare_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    found: Tensor,
) -> None:
    """Compare Mamba-2's scan with the library's reference of Mamba's, a head's channels alike."""
    width = x.shape[3]
    if dt_limit != (0.0, math.inf) or is_traced():
        return

    def channels(y: Tensor) -> Tensor:
        return y.repeat_interleave(width, -1).transpose(1, 2)

    bias = None if dt_bias is None else dt_bias.repeat_interleave(width)
    given = {
        "u": x.flatten(2).transpose(1, 2),
        "delta": channels(dt),
        "A": A.repeat_interleave(width)[:, None].expand(-1, B.shape[-1]),
        "B": B.permute(0, 2, 3, 1),
        "C": C.permute(0, 2, 3, 1),
        "D": None if D is None else D.flatten() if D.dim() == 2 else D.repeat_interleave(width),
        "z": None if z is None else z.flatten(2).transpose(1, 2),
        "delta_bias": bias,
        "delta_softplus": dt_softplus,
    }
    compare(SCAN, given, found.flatten(2).transpose(1, 2))


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int = 0,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Any:
    """Stand in for ``mamba_split_conv1d_scan_combined``: a block of Mamba-2 between projections."""
    refuse_packed(seq_idx)
    heads = D.shape[0]
    width = heads * (D.shape[1] if D.dim() == 2 else headdim or 0)
    states = (conv1d_weight.shape[0] - width) // ngroups // 2
    keys = ngroups * states
    rest = (zxbcdt.shape[-1] - 2 * width - 2 * keys - heads) // 2
    sizes = [rest, rest, width, width + 2 * keys, heads]
    z0, x0, z, xBC, dt = zxbcdt.split(sizes, -1)
    xBC, _ = convolved(xBC.transpose(1, 2), conv1d_weight, conv1d_bias, activation)
    x, B, C = xBC.transpose(1, 2).split([width, keys, keys], -1)
    y, last = mamba_chunk_scan_combined(
        x.unflatten(-1, (heads, -1)),
        dt,
        A,
        B.unflatten(-1, (ngroups, -1)),
        C.unflatten(-1, (ngroups, -1)),
        chunk_size,
        D,
        z.unflatten(-1, (heads, -1)) if rmsnorm_weight is None else None,
        dt_bias,
        initial_states,
        dt_softplus=True,
        dt_limit=dt_limit,
        return_final_states=True,
    )
    y = y.flatten(2)
    if rmsnorm_weight is not None:
        y = layernorm_fn(
            y, rmsnorm_weight, None, z, rmsnorm_eps, width // ngroups, norm_before_gate, True
        )
    y = torch.cat([F.silu(z0) * x0, y], -1) if rest else y
    y = y if outproj_weight is None else F.linear(y, outproj_weight, outproj_bias)
    return (y, last) if return_final_states else y


SCAN = "mamba_ssm.ops.selective_scan_interface.selective_scan_ref"
MAMBA = ("mamba_ssm",)
ONE = "Mamba's scan, S_t = exp(delta_t A) S_{t-1} + B_t (delta_t x_t)^T"
TWO = "Mamba-2's scan, S_t = exp(delta_t A) S_{t-1} + B_t (delta_t x_t)^T by heads"

KERNELS = (
    GpuKernel(MAMBA, ("selective_scan_fn",), selective_scan_fn, ONE, SCAN.partition(".")[2]),
    GpuKernel(
        MAMBA,
        ("mamba_inner_fn",),
        mamba_inner_fn,
        f"{ONE}, between its projections",
        "ops.selective_scan_interface.mamba_inner_ref",
    ),
    GpuKernel(
        MAMBA, ("mamba_inner_fn_no_out_proj",), mamba_inner_fn_no_out_proj, f"{ONE}, in a block"
    ),
    GpuKernel(MAMBA, ("bimamba_inner_fn",), bimamba_inner_fn, f"{ONE}, in both directions"),
    GpuKernel(MAMBA, ("mamba_chunk_scan_combined",), mamba_chunk_scan_combined, TWO),
    GpuKernel(
        MAMBA,
        ("mamba_split_conv1d_scan_combined",),
        mamba_split_conv1d_scan_combined,
        f"{TWO}, between its projections",
    ),
)
