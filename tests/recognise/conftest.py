"""The spellings, exported once each, and an independent float64 reference for them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from linexport.trace.graph import to_onnx

HERE = Path(__file__).parent


def load(name: str) -> ModuleType:
    """A module of this folder: pytest's importlib mode gives tests no package to import from."""
    known = sys.modules.get(f"recognise_{name}")
    if known is None:
        spec = importlib.util.spec_from_file_location(f"recognise_{name}", HERE / f"{name}.py")
        assert spec is not None and spec.loader is not None
        known = importlib.util.module_from_spec(spec)
        sys.modules[f"recognise_{name}"] = known
        spec.loader.exec_module(known)
    return known


spellings = load("spellings")


class Packed(nn.Module):
    """A spelling on query, key and value side by side, so that their lengths are one."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.spelling = find(name)
        torch.manual_seed(0)
        self.inner = self.spelling.build().eval()

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 3 * WIDTH), or (B, T, WIDTH) where the module projects."""
        parts = x.chunk(3, -1) if self.spelling.inputs == 3 else (x,)
        return self.inner(*parts)

    def example(self, batch: int, length: int, seed: int = 0) -> Tensor:
        """A standard normal input."""
        generator = torch.Generator().manual_seed(seed)
        width = spellings.WIDTH * self.spelling.inputs
        return torch.randn(batch, length, width, generator=generator)


def find(name: str):
    """The spelling of that name."""
    s = spellings
    tables = (s.CAUSAL, s.BIDIRECTIONAL, s.OTHER, s.SEPARATE)
    return next(t[name] for t in tables if name in t)


@cache
def exported(name: str) -> tuple[Packed, onnx.ModelProto]:
    """A spelling with the graph it is exported to, with dynamic batch and length."""
    module = Packed(name)
    example = (module.example(2, module.spelling.length),)
    dynamic = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    with torch.no_grad():
        program = torch.export.export(module, example, dynamic_shapes=dynamic, strict=False)
    model = to_onnx(program, {})
    return module, model


TABLES = {
    "causal": spellings.CAUSAL,
    "bidirectional": spellings.BIDIRECTIONAL,
    "other": spellings.OTHER,
    "separate": spellings.SEPARATE,
    "spelling": {**spellings.CAUSAL, **spellings.BIDIRECTIONAL},
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for ``causal`` runs once for every causal spelling, and so on."""
    for name, table in TABLES.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, list(table))


@pytest.fixture(scope="session")
def export() -> Callable[[str], tuple[Packed, onnx.ModelProto]]:
    """``export(name)``: the module and its graph."""
    return exported


@pytest.fixture(scope="session")
def random_graphs() -> ModuleType:
    """The generator of random graphs."""
    return load("random_graphs")


@pytest.fixture(scope="package", autouse=True)
def alone(one_thread: None) -> None:
    """Tensors of these tests are tiny."""
