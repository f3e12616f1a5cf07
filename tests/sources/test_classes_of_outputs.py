"""Modules whose forward takes or returns classes of their author."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import linexport
from linexport.errors import UnsupportedModelError

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}

Pair = namedtuple("Pair", ["y", "total"])


@dataclass
class Auxiliary:
    total: Tensor
    loss: Tensor | None = None


@dataclass
class Output:
    """Some fields may be None, others are classes again."""

    hidden: Tensor
    cache: Tensor | None = None
    auxiliary: Auxiliary | None = None
    states: list[Tensor] = field(default_factory=list)


@dataclass
class Batch:
    x: Tensor
    mask: Tensor


class Plain:
    def __init__(self, y: Tensor) -> None:
        self.y = y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> object:
        y = self.project(x).cumsum(1)
        return Output(y, auxiliary=Auxiliary(y.sum(1)), states=[y[:, -1]])


class OfBatches(Model):
    def forward(self, batch: Batch) -> object:
        return Pair(self.project(batch.x * batch.mask[..., None]).cumsum(1), batch.mask.sum(1))


class OfPlain(Model):
    def forward(self, x: Tensor) -> object:
        return Plain(self.project(x))


def test_fields_of_a_dataclass_are_outputs(tmp_path: Path) -> None:
    model = Model().eval()
    made = linexport.convert(
        (model, (torch.randn(2, 12, 8),), (SHAPES,)), tmp_path / "made", bench=False, threads=1
    )
    assert made.status == "ok"
    x = torch.randn(3, 41, 8)
    with torch.no_grad():
        expected = model(x)
    assert isinstance(expected, Output) and expected.auxiliary is not None
    found = linexport.load(tmp_path / "made", threads=1).run(x.numpy())
    tensors = (expected.hidden, expected.auxiliary.total, expected.states[0])
    for a, b in zip(found.values(), tensors, strict=True):
        np.testing.assert_allclose(a, b.numpy(), rtol=0, atol=1e-6 * b.abs().max())


def test_fields_of_a_dataclass_are_inputs(tmp_path: Path) -> None:
    batch = Batch(torch.randn(2, 12, 8), torch.rand(2, 12))
    model = OfBatches().eval()
    made = linexport.convert(
        (model, (batch,), ([SHAPES, SHAPES],)), tmp_path / "made", bench=False, threads=1
    )
    assert made.status == "ok"
    other = Batch(torch.randn(3, 41, 8), torch.rand(3, 41))
    with torch.no_grad():
        expected = model(other)
    names = [given.name for given in made.inputs]
    feeds = dict(zip(names, (other.x.numpy(), other.mask.numpy()), strict=False))
    found = linexport.load(tmp_path / "made", threads=1).run(**feeds)
    for a, b in zip(found.values(), expected, strict=True):
        np.testing.assert_allclose(a, b.numpy(), rtol=0, atol=1e-6 * b.abs().max())


def test_another_class_is_refused_with_what_to_return() -> None:
    with pytest.raises(UnsupportedModelError, match=r"returns a Plain.*dataclass"):
        linexport.convert((OfPlain().eval(), (torch.randn(2, 12, 8),)), bench=False)
