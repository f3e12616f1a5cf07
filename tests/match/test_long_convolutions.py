"""Convolutions with kernels as long as the sequence: fused where they are sums of exponentials."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import linexport
from linexport.sources.factory import load_module
from linexport.trace import trace
from tests.support.convolutions import (
    convolution,
    cut_convolution,
    fourier,
    fourier_of_odd_length,
    toeplitz,
    toeplitz_under_tril,
)
from tests.support.independent import check_independently

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, STATES = 16, 4


def around(u: Tensor, kernel: Tensor) -> Tensor:
    """A cycle as long as the sequence: the last tokens reach the first."""
    length = u.shape[-1]
    spectrum = torch.fft.rfft(u, n=length) * torch.fft.rfft(kernel, n=length)
    return torch.fft.irfft(spectrum, n=length)[..., :length]


class Exponentials(nn.Module):
    """A diagonal state space with real rates, by its kernel.

    Args:
        convolve: of (B, D, T) with (D, T).
        times: what powers are multiplied by, of their positions.
    """

    def __init__(
        self,
        convolve: Callable[[Tensor, Tensor], Tensor],
        times: Callable[[Tensor], Tensor] = torch.ones_like,
    ) -> None:
        super().__init__()
        self.convolve, self.times = convolve, times
        self.project = nn.Linear(WIDTH, WIDTH)
        self.log_step = nn.Parameter(torch.rand(WIDTH) * 2 - 4)
        self.log_rate = nn.Parameter(torch.log(1 + torch.arange(STATES)).repeat(WIDTH, 1))
        self.c = nn.Parameter(torch.randn(WIDTH, STATES))
        self.skip = nn.Parameter(torch.randn(WIDTH))

    def kernel(self, length: int, dtype: torch.dtype) -> Tensor:
        """(D, T)."""
        rate = -self.log_rate.exp() * self.log_step.exp()[:, None]
        t = torch.arange(length, dtype=dtype)
        return torch.einsum("dn,dnt->dt", self.c, torch.exp(rate[..., None] * t) * self.times(t))

    def forward(self, x: Tensor) -> Tensor:
        u = self.project(x).mT
        y = self.convolve(u, self.kernel(x.shape[1], x.dtype)) + self.skip[:, None] * u
        return torch.nn.functional.gelu(y).mT


def converted(module: nn.Module, folder: Path):
    dynamic = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    given = (module.eval(), (torch.randn(2, 20, WIDTH),), dynamic)
    loaded = load_module(given, "long_convolutions:layer")
    return linexport.convert(loaded, folder, bench=False, threads=1)


@pytest.mark.parametrize(
    "convolve",
    [
        fourier,
        fourier_of_odd_length,
        toeplitz,
        toeplitz_under_tril,
        pytest.param(convolution, marks=pytest.mark.slow),
        cut_convolution,
    ],
    ids=lambda f: f.__name__,
)
def test_a_sum_of_exponentials_streams(
    convolve: Callable[[Tensor, Tensor], Tensor], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = Exponentials(convolve)
    manifest = converted(module, tmp_path / "a")
    assert manifest.status == "ok"
    assert dict(manifest.fused) == {"DiagonalStateSpace": 1}
    (state,) = manifest.states
    assert list(state.shape)[1:] == [WIDTH, STATES, 1]
    assert manifest.streaming is not None and manifest.streaming.passed
    check_independently(tmp_path / "a", module, WIDTH, lengths=(1, 2, 7, 130, 517))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (lambda: Exponentials(around), "circular convolution, in which the last tokens reach"),
        (lambda: Exponentials(fourier, torch.sqrt), "along seq, which needs all tokens"),
    ],
    ids=["around", "times a root"],
)
def test_what_is_none_is_left(module: Callable[[], nn.Module], reason: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = module()
    manifest = converted(made, tmp_path / "a")
    assert manifest.status == "ok" and not manifest.fused and not manifest.states
    assert reason in manifest.rejected[0].reason
    assert "sum of exponentials of positions" in manifest.rejected[0].reason
    check_independently(tmp_path / "a", made, WIDTH, lengths=(2, 7, 130, 517))


class Padded(nn.Module):
    """Convolutions padded by sizes of the input, of which all outputs are read, or other ones."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        u, n = x.mT, x.shape[1]
        weight = (torch.arange(n) / n).expand(WIDTH, 1, -1).to(x.dtype)
        along = {"padding": n - 1, "groups": WIDTH}
        whole = nn.functional.conv1d(u, weight, **along)
        sparse = nn.functional.conv1d(u, weight, stride=2, **along)[..., :n]
        plane = nn.functional.conv2d(u[:, None], weight[:1, None], padding=(2, n // 2))
        return whole.mT, whole[..., 1 : n + 1].mT, sparse.mT, plane[:, 0].mT


def test_padding_by_a_size_of_the_input_is_written_as_zeros() -> None:
    """torch.onnx has no translation: padding is a list of numbers in ONNX."""
    module = Padded().eval()
    dynamic = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    traced = trace(load_module((module, (torch.randn(2, 20, WIDTH),), dynamic), "padded:layer"))
    session = onnxruntime.InferenceSession(traced.model.SerializeToString())
    for length in (2, 7, 33):
        x = torch.randn(3, length, WIDTH)
        for expected, got in zip(
            module(x.double()), session.run(None, {"x": x.numpy()}), strict=True
        ):
            torch.testing.assert_close(
                torch.from_numpy(got).double(), expected, atol=1e-5, rtol=1e-5
            )
