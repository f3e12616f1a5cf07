"""Causal convolutions that mix channels, or skip tokens, carry a state, as plain ones do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import linexport
from linexport.sources.factory import load_module
from tests.support.independent import check_independently

pytestmark = pytest.mark.usefixtures("one_thread")


class Mixed(nn.Module):
    """A convolution before attention, padded in one of the usual ways."""

    def __init__(self, width: int, taps: int, channels: int = 16, **options: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = (taps - 1) * options.get("dilation", 1)
        self.first = nn.Linear(16, channels)
        self.conv = nn.Conv1d(channels, 3 * width, taps, **options)
        self.out = nn.Linear(width, 16)

    def convolved(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (self.before, 0)))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 16)."""
        q, k, v = self.convolved(self.first(x).mT).mT.chunk(3, -1)
        return self.out((q.relu() @ k.relu().mT).tril() @ v)


class CutBehind(Mixed):
    def convolved(self, x: Tensor) -> Tensor:
        self.conv.padding = (self.before,)
        return self.conv(x)[..., : x.shape[-1]]


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(Mixed(8, 2), id="two taps"),
        pytest.param(Mixed(16, 4, bias=False), id="four taps"),
        pytest.param(Mixed(8, 3, channels=1), id="one channel"),
        pytest.param(CutBehind(8, 3), id="cut behind"),
        pytest.param(Mixed(8, 3, dilation=4), id="with gaps"),
        pytest.param(Mixed(8, 2, channels=24, groups=24, dilation=8), id="gaps, each channel"),
        pytest.param(Mixed(8, 3, groups=4), id="in groups"),
        pytest.param(Mixed(16, 3, groups=16), id="several of each channel"),
        pytest.param(CutBehind(8, 3, groups=2, dilation=3), id="groups with gaps, cut behind"),
    ],
)
def test_it_streams(tmp_path: Path, module: Mixed) -> None:
    dynamic = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    source = load_module((module.eval(), (torch.randn(2, 16, 16),), dynamic), "mixed:conv")
    manifest = linexport.convert(source, tmp_path / "a", bench=False, threads=1)
    assert manifest.status == "ok" and manifest.streaming.passed
    states = {state.op: state.shape for state in manifest.states}
    assert set(states) == {"Conv", "LinearAttention"}
    assert states["Conv"] == ("batch", module.conv.in_channels, module.before)
    check_independently(tmp_path / "a", module, 16, lengths=(1, 2, 130))


def test_a_gate_beside_a_convolution_shares_its_state(tmp_path: Path) -> None:
    """As in WaveNet, whose dilations double from layer to layer."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.dilations = [1, 2, 4]
            self.convs, self.gates = (
                nn.ModuleList(nn.Conv1d(8, 8, 2, dilation=d) for d in self.dilations)
                for _ in range(2)
            )
            self.project = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            """(B, T, 8)."""
            x = x.mT
            for dilation, conv, gate in zip(self.dilations, self.convs, self.gates, strict=True):
                padded = F.pad(x, (dilation, 0))
                x = x + conv(padded).tanh() * gate(padded).sigmoid()
            q, k, v = self.project(x.mT).chunk(3, -1)
            return (q.relu() @ k.relu().mT).tril() @ v

    module = Gated().eval()
    source = load_module((module, (torch.randn(2, 16, 8),)), "gated:convs")
    manifest = linexport.convert(source, tmp_path / "a", bench=False, threads=1)
    shapes = [state.shape[1:] for state in manifest.states if state.op == "Conv"]
    assert shapes == [(8, dilation) for dilation in module.dilations]
    check_independently(tmp_path / "a", module, 8, lengths=(1, 2, 130))
