"""Work that is left out of torch's exporter: it is where torch 2.13 has it, and is not missed."""

from __future__ import annotations

import importlib
import re
from typing import Any

import onnx
import pytest
import torch
from torch.export import Dim

from linexport.trace import exporter_work
from linexport.trace.exporter_work import work_left_out
from linexport.trace.graph import to_onnx


def place(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


class Mixed(torch.nn.Module):
    """Numbers of several types in one operator, before and behind a branch; composite operators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("steps", torch.arange(4))

    def forward(self, x):
        positions = torch.arange(x.shape[1])
        x = self.linear(x) + positions[:, None] * self.steps / 3 + 1
        x = torch.where(x > 0, x**2, torch.tensor(2)) + (x > 1) + x.half() * self.steps
        branches = lambda y: y * self.steps, lambda y: y - positions[:, None]
        x = torch.cond(x.sum() > 0, *branches, (x,))
        return torch.nn.functional.gelu(x), positions.sum() / x.shape[0], x.double() + x


def exported() -> onnx.ModelProto:
    dims = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    torch.manual_seed(0)
    module, example = Mixed().eval(), (torch.randn(2, 5, 4),)
    return to_onnx(torch.export.export(module, example, dynamic_shapes=dims))


def unnumbered(model: onnx.ModelProto) -> str:
    """Everything in a model, without the numbers that torch gives to code it makes."""
    return re.sub(r"<eval_with_key>\.\d+", "", str(model))


def test_programs_are_translated_to_the_same_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    found = exported()
    assert {"Cast", "If", "Gelu"} <= {node.op_type for node in found.graph.node}
    monkeypatch.setattr(exporter_work, "CHANGES", ())
    assert unnumbered(found) == unnumbered(exported())


def test_every_place_is_changed_and_restored() -> None:
    places = [entry[:2] for entry in exporter_work.CHANGES]
    before = [place(*each) for each in places]
    with work_left_out():
        inside = [place(*each) for each in places]
    assert all(a is not b for a, b in zip(before, inside, strict=True))
    assert all(place(*each) is a for each, a in zip(places, before, strict=True))
    keys = {key.name for key in [*inside[1], *inside[2]]}
    assert {"CPU", "CUDA", "Meta", "AutogradCPU"} <= keys and "XLA" not in keys


def test_places_that_torch_does_not_have_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ("torch.export", "no_module_of.that_name", len), ("torch.export", "nothing", len)
    monkeypatch.setattr(exporter_work, "CHANGES", missing)
    with work_left_out():
        assert not hasattr(torch.export, "nothing")
