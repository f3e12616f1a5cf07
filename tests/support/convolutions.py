"""Causal convolutions of (B, D, T) with kernels (D, T) as long as the sequence."""

from __future__ import annotations

import torch
from torch import Tensor


def fourier(u: Tensor, kernel: Tensor) -> Tensor:
    """S4D's: (B, D, T) with (D, T)."""
    length = u.shape[-1]
    spectrum = torch.fft.rfft(u, n=2 * length) * torch.fft.rfft(kernel, n=2 * length)
    return torch.fft.irfft(spectrum, n=2 * length)[..., :length]


def fourier_of_odd_length(u: Tensor, kernel: Tensor) -> Tensor:
    length = u.shape[-1]
    n = 2 * length - 1
    spectrum = torch.fft.rfft(kernel.mT, n=n, dim=0) * torch.fft.rfft(u.mT, n=n, dim=1)
    return torch.fft.irfft(spectrum, n=n, dim=1)[:, :length].mT


def toeplitz(u: Tensor, kernel: Tensor) -> Tensor:
    t = torch.arange(u.shape[-1], dtype=u.dtype)
    lag = t[:, None] - t
    matrix = kernel[:, lag.clamp(min=0).long()]
    matrix = torch.where(lag >= 0, matrix, torch.zeros((), dtype=u.dtype))
    return torch.einsum("dts,bds->bdt", matrix, u)


def toeplitz_under_tril(u: Tensor, kernel: Tensor) -> Tensor:
    t = torch.arange(u.shape[-1])
    return (kernel[:, (t[:, None] - t).clamp(min=0)].tril() @ u[..., None])[..., 0]


def convolution(u: Tensor, kernel: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(u, (u.shape[-1] - 1, 0))
    return torch.nn.functional.conv1d(padded, kernel.flip(-1)[:, None], groups=len(kernel))


def cut_convolution(u: Tensor, kernel: Tensor) -> Tensor:
    """Zeros on both sides, by ``padding``; what reads those behind is cut off."""
    length, weight = u.shape[-1], kernel.flip(-1)[:, None]
    whole = torch.nn.functional.conv1d(u, weight, padding=length - 1, groups=len(kernel))
    return whole[..., :length]
