"""Causal convolutions that mix channels carry a state, as those of one channel do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import linexport
from linexport.loaders.factory import load_module
from tests.support.independent import check_independently

pytestmark = pytest.mark.usefixtures("one_thread")


class Mixed(nn.Module):
    """A convolution of all channels before attention, padded in one of the usual ways."""

    def __init__(self, width: int, taps: int, channels: int = 16, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.taps = taps
        self.first = nn.Linear(16, channels)
        self.conv = nn.Conv1d(channels, 3 * width, taps, bias=bias)
        self.out = nn.Linear(width, 16)

    def convolved(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (self.taps - 1, 0)))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 16)."""
        q, k, v = self.convolved(self.first(x).mT).mT.chunk(3, -1)
        return self.out((q.relu() @ k.relu().mT).tril() @ v)


class CutBehind(Mixed):
    def convolved(self, x: Tensor) -> Tensor:
        pads = self.taps - 1
        return F.conv1d(x, self.conv.weight, self.conv.bias, padding=pads)[..., :-pads]


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(Mixed(8, 2), id="two taps"),
        pytest.param(Mixed(16, 4, bias=False), id="four taps"),
        pytest.param(Mixed(8, 3, channels=1), id="one channel"),
        pytest.param(CutBehind(8, 3), id="cut behind"),
    ],
)
def test_it_streams(tmp_path: Path, module: Mixed) -> None:
    dynamic = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    source = load_module((module.eval(), (torch.randn(2, 16, 16),), dynamic), "mixed:conv")
    manifest = linexport.convert(source, tmp_path / "a", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.streaming.passed
    states = {state.op: state.shape for state in manifest.states}
    assert set(states) == {"Conv", "LinearAttention"}
    assert states["Conv"] == ("batch", module.conv.in_channels, module.taps - 1)
    check_independently(tmp_path / "a", module, 16, lengths=(1, 2, 130))
