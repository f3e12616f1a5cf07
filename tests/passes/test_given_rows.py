"""Rows of earlier tokens that a model takes, in front of its tokens, and returns.

Whole sequences and pieces of an artifact against the module in float64, the first call of a
sequence with rows that are not zeros.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import linexport
from linexport.manifest import Manifest
from linexport.sources.factory import load_module
from tests.support.independent import Independent

WIDTH, TAPS = 6, 4
BATCH = 3

Outputs = tuple[Tensor, ...]


class Columns(nn.Module):
    """The columns before a convolution and, as mamba_ssm keeps it, one more than it reads."""

    sizes = ((WIDTH, TAPS),)

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, TAPS, groups=WIDTH)

    def forward(self, x: Tensor, seen: Tensor) -> Outputs:
        long = torch.cat([seen, x.mT], -1)
        return F.silu(self.mix(long[..., 1:])).mT.cumsum(1), long[..., -TAPS:]


class Stacked(nn.Module):
    """Rows of two layers in one input and one output; a convolution over channels with gaps."""

    sizes = ((2, 2 * (TAPS - 1), WIDTH),)

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, TAPS, dilation=2) for _ in range(2))

    def forward(self, x: Tensor, seen: Tensor) -> Outputs:
        last = []
        for mix, own in zip(self.mix, seen.unbind(1), strict=True):
            long = torch.cat([own, x], 1)
            last.append(long[:, -2 * (TAPS - 1) :])
            x = x + 0.1 * mix(long.mT).mT.cumsum(1)
        return x, torch.stack(last, 1)


class Shifts(nn.Module):
    """RWKV's shifts in front of time mixing and channel mixing: one row each, without an axis."""

    sizes = ((WIDTH,), (WIDTH,))

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, first: Tensor, second: Tensor) -> Outputs:
        y = self.norm(x)
        x = x + self.mix(torch.cat([first[:, None], y[:, :-1]], 1) - y).cumsum(1)
        z = self.norm(x)
        x = x + self.mix(torch.cat([second[:, None], z], 1)[:, :-1]).sigmoid() * z
        return x, y[:, -1], z[:, -1]


class Zeros(nn.Module):
    """No rows are taken; the last ones are returned, of zeros where there are fewer tokens."""

    sizes = ()

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, TAPS)

    def forward(self, x: Tensor) -> Outputs:
        long = F.pad(x.mT, (TAPS - 1, 0))
        return self.mix(long).mT.cumsum(1), long[..., 1 - TAPS :]


class Mean(Columns):
    """What is returned is of all tokens."""

    def forward(self, x: Tensor, seen: Tensor) -> Outputs:
        y, _ = super().forward(x, seen)
        return y, torch.cat([seen, x.mT], -1).mean(-1)


class First(Columns):
    """The first columns are returned, which are others in each call."""

    def forward(self, x: Tensor, seen: Tensor) -> Outputs:
        y, _ = super().forward(x, seen)
        return y, torch.cat([seen, x.mT], -1)[..., :TAPS]


def converted(module: nn.Module, sizes: tuple[tuple[int, ...], ...], folder: Path) -> Manifest:
    examples = (torch.randn(2, 12, WIDTH), *(torch.randn(2, *size) for size in sizes))
    dynamic = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, *({0: Dim.DYNAMIC} for _ in sizes))
    loaded = load_module((module.eval(), examples, dynamic), "rows:module")
    return linexport.convert(loaded, folder, target="onnx", bench=False, threads=1)


@pytest.mark.parametrize("kind", [Columns, Stacked, Shifts, Zeros])
def test_rows_that_are_given_begin_a_stream(kind: type[nn.Module], tmp_path: Path) -> None:
    module = kind()
    sizes: tuple[tuple[int, ...], ...] = module.sizes
    manifest = converted(module, sizes, tmp_path / "a")
    assert manifest.status == "ok" and manifest.streaming.passed
    found, random = Independent(tmp_path / "a"), np.random.default_rng(3)
    for length in (1, 2, 9, 140):
        x = random.standard_normal((BATCH, length, WIDTH)).astype(np.float32)
        rows = [random.standard_normal((BATCH, *size)).astype(np.float32) for size in sizes]
        with torch.no_grad():
            given = [torch.from_numpy(a).double() for a in (x, *rows)]
            expected = [y.numpy() for y in module.double()(*given)]
        for pieces in ([length], [1] * length, [length // 2 + 1, length - length // 2 - 1]):
            got = found.outputs(x, [n for n in pieces if n], rows)
            for one, exact in zip(got, expected, strict=True):
                assert one.shape == exact.shape
                assert np.abs(one - exact).max() <= 2e-5 * np.abs(exact).max()


@pytest.mark.parametrize("kind", [Mean, First])
def test_rows_of_which_others_than_the_last_are_returned_give_no_state(
    kind: type[Columns], tmp_path: Path
) -> None:
    manifest = converted(kind(), kind.sizes, tmp_path / "a")
    assert manifest.status == "ok" and manifest.streaming.passed is None
    assert not manifest.states
