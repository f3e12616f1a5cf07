"""Convolutions whose kernel is a sum of complex exponentials of positions, in real numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import linexport
from linexport import passes
from linexport.graph import states
from linexport.sources.factory import load_module
from linexport.trace import trace
from tests.support import convolutions
from tests.support.independent import check_independently
from tests.support.loops import session_of

pytestmark = pytest.mark.usefixtures("one_thread")

CHANNELS, POLES = 3, 4
RATES = (0.0, -0.01, -1.0, -100.0)
"""One that keeps everything, and one whose inverse leaves float32 within a token."""

Kernel = Callable[["Oscillators", Tensor], Tensor]


class Oscillators(nn.Module):
    """A diagonal state space with complex rates a + ib and outputs c + id, by its kernel."""

    def __init__(
        self,
        kernel: Kernel,
        convolve: Callable[[Tensor, Tensor], Tensor] = convolutions.fourier,
    ) -> None:
        super().__init__()
        self.kernel, self.convolve = kernel, convolve
        draw = torch.Generator().manual_seed(0)
        shape = (CHANNELS, POLES)
        self.a = nn.Parameter(torch.tensor(RATES).repeat(CHANNELS, 1))
        self.b = nn.Parameter(6 * torch.rand(shape, generator=draw) - 3)
        self.c = nn.Parameter(torch.randn(shape, generator=draw))
        self.d = nn.Parameter(torch.randn(shape, generator=draw))
        self.step = nn.Parameter(torch.rand(CHANNELS, generator=draw) + 0.5)

    def forward(self, u: Tensor) -> Tensor:
        """(B, channels, T)."""
        return self.convolve(u, self.kernel(self, torch.arange(u.shape[-1], dtype=u.dtype)))


def waves(self: Oscillators, t: Tensor) -> tuple[Tensor, Tensor]:
    fading, angle = torch.exp(self.a[..., None] * t), self.b[..., None] * t
    return fading * angle.cos(), fading * angle.sin()


def separate(self: Oscillators, t: Tensor) -> Tensor:
    re, im = waves(self, t)
    real, imaginary = (
        torch.einsum("dn,dnt->dt", weight, x) for weight, x in ((self.c, re), (self.d, im))
    )
    return real - imaginary


def factored(self: Oscillators, t: Tensor) -> Tensor:
    fading, angle = torch.exp(self.a[..., None] * t), self.b[..., None] * t
    return (fading * (self.c[..., None] * angle.cos() - self.d[..., None] * angle.sin())).sum(1)


def stepped(self: Oscillators, t: Tensor) -> Tensor:
    """Twice the real part, with times of each channel, the angles of one sign."""
    time = self.step[:, None, None] * t
    fading, angle = torch.exp(self.a[..., None] * time), -self.b[..., None] * time
    re, im = fading * torch.cos(angle), fading * torch.sin(angle)
    return 2 * (self.c[..., None] * re - self.d[..., None] * im).sum(1)


def of_a_product(self: Oscillators, t: Tensor) -> Tensor:
    """The real part of (c + id) ((step + id) e^{(a + ib) t}), multiplied out."""
    re, im = waves(self, t)
    p, q = self.step[:, None, None], self.d[..., None]
    re, im = p * re - q * im, p * im + q * re
    return (self.c[..., None] * re - self.d[..., None] * im).sum(1)


def of_all_channels(self: Oscillators, t: Tensor) -> Tensor:
    """Poles that all channels share, by products of matrices."""
    fading, angle = torch.exp(self.a[0][:, None] * t), self.b[0][:, None] * t
    return self.c @ (fading * angle.cos()) - self.d @ (fading * angle.sin())


def one_sine(self: Oscillators, t: Tensor) -> Tensor:
    """A kernel that begins with 0."""
    return torch.exp(-0.1 * t) * torch.sin(0.7 * t) * self.c[:, :1]


def of_two_angles(self: Oscillators, t: Tensor) -> Tensor:
    re, _ = waves(self, t)
    fading, angle = torch.exp(self.a[..., None] * t), 2 * self.b[..., None] * t
    return (self.c[..., None] * re + self.d[..., None] * fading * angle.sin()).sum(1)


def of_squares(self: Oscillators, t: Tensor) -> Tensor:
    fading, angle = torch.exp(self.a[..., None] * t), self.b[..., None] * t * t
    return (self.c[..., None] * fading * angle.cos()).sum(1)


def rewritten(module: nn.Module) -> passes.Rewritten:
    example = (torch.randn(2, CHANNELS, 20),)
    dynamic = ({0: Dim.DYNAMIC, 2: Dim.DYNAMIC},)
    return passes.rewrite(trace(load_module((module.eval(), example, dynamic), "a:kernel")).model)


def in_pieces(model: onnx.ModelProto, u: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    (state,) = states.find_states(model)
    session, past, found, start = session_of(model), state.start(len(u)), [], 0
    for size in sizes:
        piece = u[..., start : start + size]
        got, past = session.run(None, {"u": piece, state.past: past})
        found.append(got)
        start += size
    assert start == u.shape[-1]
    return np.concatenate(found, -1)


def in_float64(module: nn.Module, u: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = module.double()(torch.from_numpy(u).double()).numpy()
    module.float()
    return found


@pytest.mark.parametrize(
    ("kernel", "convolve"),
    [
        (separate, convolutions.fourier),
        (factored, convolutions.fourier_of_odd_length),
        (stepped, convolutions.toeplitz_under_tril),
        (of_a_product, convolutions.fourier),
        (of_all_channels, convolutions.convolution),
        (one_sine, convolutions.toeplitz),
    ],
    ids=lambda f: f.__name__,
)
def test_channels_that_turn_are_fused(
    kernel: Kernel, convolve: Callable[[Tensor, Tensor], Tensor]
) -> None:
    module = Oscillators(kernel, convolve)
    found = rewritten(module)
    (match,) = found.findings.matches
    width = 2 if kernel is one_sine else 2 * POLES
    assert (match.update_rule, match.q_num_heads, match.d_k) == ("gated", CHANNELS, width)
    random = np.random.default_rng(0)
    for sizes in ([2], [64], [65], [129], [63, 1, 0, 64, 70], [1] * 130):
        u = random.standard_normal((2, CHANNELS, sum(sizes))).astype(np.float32)
        expected = in_float64(module, u)
        error = np.abs(in_pieces(found.model, u, sizes) - expected).max()
        assert error < 3e-6 * np.abs(expected).max(), sizes


def test_a_real_kernel_of_all_channels_is_one_head() -> None:
    def shared(self: Oscillators, t: Tensor) -> Tensor:
        return (self.c[0][:, None] * torch.exp(self.a[0][:, None] * t)).sum(0, keepdim=True)

    module = Oscillators(shared)
    found = rewritten(module)
    (match,) = found.findings.matches
    assert (match.q_num_heads, match.d_k, match.d_v) == (1, POLES, CHANNELS)
    u = np.random.default_rng(0).standard_normal((2, CHANNELS, 102)).astype(np.float32)
    expected = in_float64(module, u)
    error = np.abs(in_pieces(found.model, u, [63, 1, 38]) - expected).max()
    assert error < 3e-6 * np.abs(expected).max()


def with_a_bias(u: Tensor, kernel: Tensor) -> Tensor:
    padded = nn.functional.pad(u, (u.shape[-1] - 1, 0))
    weight, bias = kernel.flip(-1)[:, None], torch.ones(CHANNELS, dtype=u.dtype)
    return nn.functional.conv1d(padded, weight, bias, groups=CHANNELS)


def not_turned_around(u: Tensor, kernel: Tensor) -> Tensor:
    padded = nn.functional.pad(u, (u.shape[-1] - 1, 0))
    return nn.functional.conv1d(padded, kernel[:, None], groups=CHANNELS)


@pytest.mark.parametrize(
    ("kernel", "convolve", "reason"),
    [
        (of_two_angles, convolutions.fourier, "several angles"),
        (of_squares, convolutions.fourier, "sum of exponentials of positions"),
        (separate, with_a_bias, "add the bias to what it gives"),
        (separate, not_turned_around, "not K.flip(-1)"),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_other_convolutions_stay(
    kernel: Kernel, convolve: Callable[[Tensor, Tensor], Tensor], reason: str
) -> None:
    findings = rewritten(Oscillators(kernel, convolve)).findings
    assert not findings.matches
    assert reason in (*findings.unmatched, *findings.rejected)[0].reason


def test_angles_do_not_wear_off() -> None:
    """Of 24,000 tokens none is forgotten by the first pole; in one piece, in some, and in steps."""
    module = Oscillators(separate)
    model = rewritten(module).model
    u = np.random.default_rng(0).standard_normal((1, CHANNELS, 24_000)).astype(np.float32)
    a, b, c, d = (getattr(module, n).detach().double().numpy() for n in "abcd")
    factor, weight, h = np.exp(a + 1j * b), c + 1j * d, np.zeros((CHANNELS, POLES), complex)
    expected = np.zeros(u.shape)
    for t in range(u.shape[-1]):
        h = factor * h + u[0, :, t, None]
        expected[0, :, t] = (weight * h).sum(1).real
    for sizes in ([24_000], [20_000, 64, 936] + 3_000 * [1]):
        error = np.abs(in_pieces(model, u, sizes) - expected).max()
        assert error < 5e-6 * np.abs(expected).max(), len(sizes)


def test_a_state_space_layer_streams(tmp_path: Path) -> None:
    """S4D as published (Gu et al. 2022), its complex numbers in pairs."""
    width, poles = 16, 8

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_step = nn.Parameter(torch.rand(width) * 4 - 6)
            self.log_rate = nn.Parameter(torch.full((width, poles), 0.5).log())
            self.angle = nn.Parameter(torch.pi * torch.arange(poles).repeat(width, 1).float())
            self.c = nn.Parameter(torch.randn(width, poles, 2))
            self.skip = nn.Parameter(torch.randn(width))
            self.mix = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            u, step = x.mT, self.log_step.exp()[:, None]
            re, im = -self.log_rate.exp() * step, self.angle * step
            # c (exp(step a) - 1) / a, as pairs.
            size, grown = self.log_rate.exp() ** 2 + self.angle**2, torch.exp(re)
            p, q = grown * torch.cos(im) - 1, grown * torch.sin(im)
            real, imaginary = -self.log_rate.exp() / size, -self.angle / size
            p, q = p * real - q * imaginary, p * imaginary + q * real
            c = self.c[..., 0] * p - self.c[..., 1] * q, self.c[..., 0] * q + self.c[..., 1] * p
            t = torch.arange(u.shape[-1], dtype=u.dtype)
            fading, angle = torch.exp(re[..., None] * t), im[..., None] * t
            waves = fading * torch.cos(angle), fading * torch.sin(angle)
            first, second = (
                torch.einsum("hn,hnl->hl", *pair) for pair in zip(c, waves, strict=True)
            )
            y = convolutions.fourier(u, 2 * (first - second)) + self.skip[:, None] * u
            return self.mix(nn.functional.gelu(y).mT)

    torch.manual_seed(0)
    module = Layer().eval()
    given = (module, (torch.randn(2, 20, width),), ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},))
    manifest = linexport.convert(
        load_module(given, "a:layer"), tmp_path / "a", bench=False, threads=1
    )
    assert manifest.status == "ok" and dict(manifest.fused) == {"DiagonalStateSpace": 1}
    assert [list(s.shape)[1:] for s in manifest.states] == [[width, 2 * poles, 1]]
    assert manifest.streaming is not None and manifest.streaming.passed
    check_independently(tmp_path / "a", module, width, lengths=(1, 7, 200))
