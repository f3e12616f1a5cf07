"""fla and mamba_ssm on machines that triton is not made for: their kernels are defined, not run."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import linexport
from linexport.errors import UnsupportedModelError, UsageError
from linexport.manifest.inspected import SourceInspection
from linexport.patches.gpu_kernels import absent
from linexport.sources.factory import load_factory
from linexport.system.torch_internals import triton_looked_for

pytestmark = pytest.mark.usefixtures("one_thread")

KERNELS = """
import torch
import triton
import triton.language as tl
from triton.language.math import log2
from triton.runtime.autotuner import Autotuner


class Cached(Autotuner):
    def __init__(self, fn, arg_names, configs):
        super().__init__(fn, arg_names, configs)


def tuned(configs):
    def decorate(fn):
        return Cached(fn, fn.arg_names, configs)

    return decorate


@triton.jit
def helper(x, BLOCK: tl.constexpr):
    return tl.exp(x)


@triton.heuristics({"HAS_MASK": lambda given: given["mask"] is not None})
@triton.autotune(configs=[triton.Config({"BLOCK": b}, num_warps=b) for b in (4, 2)], key=["BLOCK"])
@triton.jit(do_not_specialize=["T"])
def twice_kernel(x, mask, T, BLOCK: tl.constexpr, HAS_MASK: tl.constexpr):
    tl.store(x, helper(tl.load(x), BLOCK))


@tuned([triton.Config({})])
@triton.jit
def tuned_kernel(x):
    pass


LEAST = min(config.kwargs["BLOCK"] for config in twice_kernel.configs)
BLOCKS = triton.cdiv(65, 16), triton.next_power_of_2(33), triton.next_power_of_2(64)
try:
    DEVICE = triton.runtime.driver.active.get_current_target().backend
except RuntimeError:
    DEVICE = "cpu"
assert tuned_kernel.__name__ == "tuned_kernel"
assert not isinstance(1, tl.tensor)


def l2norm(x, eps=1e-6):
    return twice_kernel[(1,)](x, None, 1)


def twice(x):
    twice_kernel[(1,)](x, None, 1, BLOCK=LEAST)
    return x
"""
NET = """
import torch
from torch import nn
from fla.ops.kernels import BLOCKS, DEVICE, LEAST, {name}

assert (BLOCKS, DEVICE, LEAST) == ((5, 64, 64), "cpu", 2)


class Net(nn.Module):
    def forward(self, x):
        return {name}(x)


def build():
    return Net(), (torch.randn(2, 6, 8),)
"""


@pytest.fixture
def looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A package fla without triton; whether PyTorch has looked for that before it is made."""
    folder = tmp_path / "fla" / "ops"
    folder.mkdir(parents=True)
    for place in (folder.parent, folder):
        (place / "__init__.py").write_text("")
    (folder / "kernels.py").write_text(KERNELS)
    hidden = {"fla", "triton"}
    for name in [n for n in sys.modules if n.partition(".")[0] in hidden]:
        monkeypatch.delitem(sys.modules, name)
    for name in hidden:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    found = importlib.machinery.PathFinder.find_spec

    def without(name: str, *args: Any) -> Any:
        return None if name.partition(".")[0] == "triton" else found(name, *args)

    monkeypatch.setattr(importlib.machinery.PathFinder, "find_spec", without)
    calls: list[str] = []
    monkeypatch.setattr(triton_looked_for, "look", lambda: calls.append("look"))
    yield calls
    for name in [n for n in sys.modules if n.partition(".")[0] == "fla"]:
        del sys.modules[name]


def written(folder: Path, name: str) -> str:
    file = folder / f"net_of_{name}.py"
    file.write_text(NET.format(name=name))
    return f"{file}:build"


def test_a_library_that_defines_kernels_loads_without_triton(
    looked: list[str], tmp_path: Path
) -> None:
    source = written(tmp_path, "l2norm")
    loaded = load_factory(source, seed=0)
    (x,) = loaded.args
    torch.testing.assert_close(
        loaded.module(x), x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
    )
    assert [kernel.name for kernel in loaded.kernels] == ["fla.ops.kernels.l2norm"]
    assert looked == ["look"]
    assert "triton" not in sys.modules
    found = linexport.inspect(source)
    assert isinstance(found, SourceInspection)
    assert len(found.kernels) == 1


def test_a_kernel_that_nothing_stands_in_for_is_named(looked: list[str], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        load_factory(written(tmp_path, "twice"), seed=0)
    assert "fla.ops.kernels.twice_kernel is a Triton kernel, which needs a GPU" in str(error.value)


def test_without_such_a_library_triton_is_made_on_request_alone(
    looked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(absent, "USERS", {"triton": ("mamba_ssm_of_nobody",)})
    file = tmp_path / "own_kernel.py"
    file.write_text(
        "import torch\nimport triton\n\n\n@triton.jit\ndef own(x):\n    pass\n\n\n"
        "class Net(torch.nn.Module):\n    def forward(self, x):\n        own[(1,)](x)\n\n\n"
        "def build():\n    return Net(), (torch.randn(2, 3),)\n"
    )
    with pytest.raises(UsageError, match="needs triton, which is not installed"):
        load_factory(f"{file}:build", seed=0)
    with pytest.raises(UnsupportedModelError, match=r"own_kernel\S*\.own is a Triton kernel"):
        load_factory(f"{file}:build", seed=0, stand_ins=True)
