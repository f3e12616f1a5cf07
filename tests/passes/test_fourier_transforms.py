"""Fourier transforms: right at lengths that are no powers of two, where a plain export is not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.export import Dim

import linexport
from linexport import passes
from linexport.sources.factory import load_module
from linexport.trace import trace
from tests.support.independent import check_independently

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 8


class Filter(nn.Module):
    """A convolution with a kernel as long as the sequence, of a small network of positions.

    Args:
        cycle: gives the length of the transforms for a number of tokens.
    """

    def __init__(self, cycle) -> None:
        super().__init__()
        self.cycle, self.network = cycle, nn.Linear(1, WIDTH)

    def forward(self, x):
        length = x.shape[1]
        n = self.cycle(length)
        place = 1 / (1 + torch.arange(length, dtype=x.dtype)[:, None])
        kernel = torch.sin(self.network(8 * place)) * place
        spectrum = torch.fft.rfft(x, n=n, dim=1) * torch.fft.rfft(kernel, n=n, dim=0)
        return torch.fft.irfft(spectrum, n=n, dim=1)[:, :length]


CYCLES = {
    "twice": lambda length: 2 * length,
    "odd": lambda length: 2 * length - 1,
    "more": lambda length: 2 * length + 1,
    "around": lambda length: length,
}


def loaded(module: nn.Module):
    dynamic = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    return load_module((module, (torch.randn(2, 16, WIDTH),), dynamic), "fourier:layer")


@pytest.mark.parametrize("cycle", CYCLES)
def test_a_kernel_of_any_kind_converts_without_state(cycle: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Filter(CYCLES[cycle]).eval()
    manifest = linexport.convert(loaded(module), tmp_path / "a", bench=False, threads=1)
    assert manifest.status == "ok" and not manifest.fused and not manifest.states
    assert "is a Fourier transform along seq" in manifest.rejected[0].reason
    check_independently(tmp_path / "a", module, WIDTH, lengths=(1, 2, 7, 130, 517), limit=2e-6)


class Turned(nn.Module):
    """Transforms of whole spectra, forth and back."""

    def forward(self, x):
        return torch.fft.ifft(torch.fft.fft(x, dim=1) * torch.fft.fft(x * x, dim=1), dim=1).real


def outputs(module: nn.Module, x: np.ndarray) -> Iterator[np.ndarray]:
    """What ONNX Runtime computes of PyTorch's graph, and of the one with precise transforms."""
    model = trace(loaded(module)).model
    for graph in (model, passes.run(model, ("canonicalise",))):
        session = onnxruntime.InferenceSession(
            graph.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        yield session.run(None, {session.get_inputs()[0].name: x})[0]


def test_digits_that_a_plain_export_loses() -> None:
    """In float32, where the length is no power of two."""
    x = np.random.default_rng(0).standard_normal((2, 517, WIDTH)).astype(np.float32)
    expected = Turned()(torch.from_numpy(x).double()).numpy()
    theirs, ours = (
        np.abs(got - expected).max() / np.abs(expected).max() for got in outputs(Turned(), x)
    )
    assert theirs > 2e-5 > 20 * ours


def test_a_plain_export_of_half_a_spectrum_may_not_run() -> None:
    """Shape inference takes half the length for the whole, and memory is planned by it."""
    module, x = Filter(CYCLES["twice"]).eval(), np.ones((2, 517, WIDTH), np.float32)
    with pytest.raises(Exception, match="DFT node"):
        next(outputs(module, x))


class Twice(nn.Module):
    """Heads first, as in Hyena."""

    def forward(self, x):
        n, u = 2 * x.shape[1], x.mT
        place = 1 / (1 + torch.arange(x.shape[1], dtype=x.dtype))
        spectrum = torch.fft.rfft(u, n=n) * torch.fft.rfft(place.sin(), n=n)
        return torch.fft.irfft(spectrum, n=n)[..., : x.shape[1]].mT


class TwoFilters(nn.Module):
    """Tokens whose one transform is multiplied with those of two kernels."""

    def forward(self, x):
        length = x.shape[1]
        place = 1 / (1 + torch.arange(length, dtype=x.dtype)[:, None])
        spectrum = torch.fft.rfft(x, n=2 * length, dim=1)
        found = [
            torch.fft.irfft(
                spectrum * torch.fft.rfft(kernel, n=2 * length, dim=0), n=2 * length, dim=1
            )
            for kernel in (place.sin(), place.cos())
        ]
        return found[0][:, :length] * found[1][:, :length]


@pytest.mark.parametrize(("module", "padded"), [(Twice, 1), (TwoFilters, 0)])
def test_causal_convolutions_have_powers_of_two(module: type[nn.Module], padded: int) -> None:
    """Only where nothing else reads the transforms."""
    model = trace(loaded(module())).model
    plain, made = (passes.run(model, stages) for stages in (("canonicalise",), passes.STATELESS))
    assert sum(node.op_type == "Ceil" for node in made.graph.node) == padded
    for length in (1, 3, 130, 517):
        x = np.random.default_rng(length).standard_normal((2, length, WIDTH)).astype(np.float32)
        first, second = (
            onnxruntime.InferenceSession(
                g.SerializeToString(), providers=["CPUExecutionProvider"]
            ).run(None, {"x": x})[0]
            for g in (plain, made)
        )
        assert np.abs(first - second).max() <= 1e-6 * np.abs(first).max()
