"""Models that need a GPU, on a machine without one: the error says what for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from linexport.errors import UnsupportedModelError
from linexport.sources.factory import load_factory, load_module

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
]

KERNEL = """
import torch
import triton
import triton.language as tl
from torch import nn


@triton.autotune(configs=[triton.Config({"BLOCK": 4})], key=["n"])
@triton.jit
def copies(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at))


class Net(nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        copies[(4,)](x, y, x.numel())
        return y


def build():
    return Net(), (torch.randn(2, 8),)
"""
LAYERS = """
from torch import nn

causal_conv1d_fn = None


class Layer(nn.Module):
    def forward(self, x):
        return causal_conv1d_fn(x)
"""


def test_a_triton_kernel_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # which runs kernels on the CPU
    (tmp_path / "net_with_kernel.py").write_text(KERNEL)
    with pytest.raises(UnsupportedModelError) as error:
        load_factory(f"{tmp_path / 'net_with_kernel.py'}:build", seed=0)
    message = str(error.value)
    assert "(copies[(4,)](x, y, x.numel())): it launches the Triton kernel " in message
    assert "net_with_kernel.copies, which needs a GPU" in message
    assert "Compute the same in PyTorch" in message
    assert "0 active drivers" not in message


class Moves(nn.Module):
    """A module that moves its input to a GPU, or makes a tensor there."""

    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.moves = moves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cuda() if self.moves else x + torch.ones(8, device="cuda")


@pytest.mark.parametrize("moves", [True, False])
def test_code_that_asks_for_a_gpu_is_told_of_the_device_of_its_inputs(moves: bool) -> None:
    with pytest.raises(UnsupportedModelError, match="it asks for a GPU") as error:
        load_module((Moves(moves).eval(), (torch.randn(2, 8),)), "net")
    assert "x.device" in str(error.value)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package fla that could not import what its layer calls."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "fla"] or ["fla"]:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").write_text("")
    (tmp_path / "fla" / "layers.py").write_text(LAYERS)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("fla.layers")
    for name in ("fla", "fla.layers"):
        sys.modules.pop(name, None)


def test_what_a_library_could_not_import_is_named_by_its_call(library: ModuleType) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        load_module((library.Layer(), (torch.randn(2, 8),)), "net")
    message = str(error.value)
    assert "layers.py:9 (return causal_conv1d_fn(x)) calls a function that its library" in message
    assert "NoneType" not in message
