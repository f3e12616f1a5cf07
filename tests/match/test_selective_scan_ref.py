"""mamba-ssm's selective scan, whose loop asks for its last step, in modules of users."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import linexport
from linexport.patches.mamba1 import FUNCTIONS
from linexport.sources.factory import load_module
from tests.support.independent import check_independently

WIDTH, STATES, GROUPS = 16, 4, 2
MODULE = "mamba_ssm.ops.selective_scan_interface"

pytestmark = pytest.mark.usefixtures("one_thread")


def selective_scan_ref(
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
    """What the package's function of this name computes, token by token."""
    delta = delta if delta_bias is None else delta + delta_bias[:, None]
    delta = F.softplus(delta) if delta_softplus else delta
    if B.dim() == 4:
        B, C = (x.repeat_interleave(u.shape[1] // x.shape[1], 1) for x in (B, C))
    else:
        B, C = (x[:, None].expand(-1, u.shape[1], -1, -1) for x in (B, C))
    state, outputs, last = torch.zeros_like(B[..., 0]), [], None
    for i in range(u.shape[2]):
        step = delta[:, :, i, None]
        state = torch.exp(step * A) * state + step * u[:, :, i, None] * B[..., i]
        outputs.append((state * C[..., i]).sum(-1))
        if i == u.shape[2] - 1:
            last = state
    out = torch.stack(outputs, 2)
    out = out if D is None else out + u * D[:, None]
    out = out if z is None else out * F.silu(z)
    return (out, last) if return_last_state else out


class Mamba(nn.Module):
    """Mamba's mixer around the scan, as a user of the package writes it."""

    def __init__(self, groups: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.groups, many = groups, STATES * max(groups, 1)
        self.sizes = (WIDTH, WIDTH, WIDTH, many, many)
        self.inside, self.out = nn.Linear(WIDTH, sum(self.sizes)), nn.Linear(WIDTH, WIDTH)
        self.rates = nn.Parameter(torch.rand(WIDTH, STATES) + 0.5)
        self.bias, self.skip = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.scan = vars(sys.modules[MODULE])["selective_scan_ref"]

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, WIDTH)."""
        x, z, delta, b, c = (y.mT for y in self.inside(x).split(self.sizes, -1))
        if self.groups:
            b, c = (y.unflatten(1, (self.groups, STATES)) for y in (b, c))
        given = (x, delta, -self.rates, b, c, self.skip)
        y = self.scan(*given, z=z, delta_bias=self.bias, delta_softplus=True)
        return self.out(y.mT)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the package's name, with the function above."""
    module = ModuleType(MODULE)
    vars(module)["selective_scan_ref"] = selective_scan_ref
    monkeypatch.setitem(sys.modules, MODULE, module)


@pytest.mark.parametrize("groups", [0, GROUPS])
@pytest.mark.usefixtures("package")
def test_the_scan_streams(tmp_path: Path, groups: int) -> None:
    given = (torch.randn(2, 12, WIDTH),)
    loaded = load_module((Mamba(groups).eval(), given), "users:mamba")
    manifest = linexport.convert(loaded, tmp_path / "a", target="onnx", bench=False, threads=1)
    assert manifest.fused["LinearAttention"] == 1 and manifest.streaming.passed
    check_independently(tmp_path / "a", Mamba(groups), WIDTH, lengths=(1, 7, 130))


@pytest.mark.parametrize("groups", [0, GROUPS])
def test_the_last_state_is_that_of_the_loop(groups: int) -> None:
    sizes = (2, groups, STATES, 9) if groups else (2, STATES, 9)
    u, delta = torch.randn(2, WIDTH, 9), torch.rand(2, WIDTH, 9)
    given = (u, delta, -torch.rand(WIDTH, STATES), torch.randn(sizes), torch.randn(sizes))
    _, last = selective_scan_ref(*(x.double() for x in given), return_last_state=True)
    _, state = FUNCTIONS[0].replacement(*given, return_last_state=True)
    torch.testing.assert_close(state.double(), last, rtol=1e-4, atol=1e-5)
