"""Compiled extensions for selective scans, which mamba_ssm and repositories of models import.

    selective_scan_cuda         of mamba_ssm:  fwd(u, delta, A, B, C, D, z, bias, softplus)
    selective_scan_cuda_core    of VMamba:     fwd(u, delta, A, B, C, D, bias, softplus, rows)
    selective_scan_cuda_oflex   and others     with one more argument: whether outputs are float32

They return the output, the last states, and of mamba_ssm's the output times silu(z) where there is
a z. The formula is that of ``mamba``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linexport.patches.gpu_kernels import GpuKernel
from linexport.patches.gpu_kernels.mamba import ONE, selective_scan_fn


def with_gate(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
) -> list[Tensor]:
    """Stand in for ``selective_scan_cuda.fwd``."""
    y, last = _scan(u, delta, A, B, C, D, delta_bias, delta_softplus)
    # Of each chunk the library keeps pairs, the second of which is the state.
    pairs = torch.stack([torch.zeros_like(last), last], -1).flatten(-2)[:, :, None]
    return [y, pairs] if z is None else [y, pairs, y * F.silu(z)]


def without_gate(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    nrows: int = 1,
    out_float: bool = True,
) -> list[Tensor]:
    """Stand in for ``fwd`` of the others."""
    y, last = _scan(u, delta, A, B, C, D, delta_bias, delta_softplus)
    return [y.float() if out_float and y.itemsize < 4 else y, last]


def _scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
) -> Any:
    return selective_scan_fn(u, delta, A, B, C, D, None, delta_bias, delta_softplus, True)


OTHERS = ("core", "oflex", "ndstate", "nrow")

KERNELS = (
    GpuKernel(("selective_scan_cuda",), ("fwd",), with_gate, ONE),
    GpuKernel(tuple(f"selective_scan_cuda_{o}" for o in OTHERS), ("fwd",), without_gate, ONE),
)

EXTENSIONS = frozenset(package for kernel in KERNELS for package in kernel.packages)
"""Their names, of which each is a module."""

NEEDED_BY = {"selective_scan_cuda": "mamba_ssm"}
"""Packages that cannot be imported without an extension."""
