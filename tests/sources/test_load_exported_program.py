"""Exported programs that are loaded: what LoadedModel holds; nothing ordinary is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

from linexport.errors import UnsupportedModelError
from linexport.sources import load_model


def test_fields_of_a_loaded_program(pt2: Path, program: torch.export.ExportedProgram) -> None:
    loaded = load_model(pt2)
    assert loaded.source.kind == "exported_program"
    assert loaded.source.location == str(pt2)
    assert loaded.source.sha256 == hashlib.sha256(pt2.read_bytes()).hexdigest()
    assert loaded.source.description == "exported program, 20 parameters"
    assert loaded.program is not None
    assert loaded.dynamic_shapes is None
    assert loaded.kwargs == {}
    assert loaded.warnings == ()  # the -inf mask is no fault
    assert program.example_inputs is not None
    torch.testing.assert_close(loaded.args, program.example_inputs[0])


@pytest.mark.parametrize("length", [6, 9, 17])
def test_module_equals_the_original_at_any_length(
    pt2: Path, program: torch.export.ExportedProgram, length: int
) -> None:
    inputs = (torch.randn(3, length, 4), torch.rand(3, length) > 0.5)
    torch.testing.assert_close(load_model(pt2).module(*inputs), program.module()(*inputs))


def test_rewriting_alone_changes_nothing(rewrite: Callable[..., Path]) -> None:
    """The control of every refusal test that uses `rewrite`."""
    assert load_model(rewrite()).source.kind == "exported_program"


def test_sizes_outside_the_guards_fail(pt2: Path) -> None:
    with pytest.raises(AssertionError, match="Guard failed"):
        load_model(pt2).module(torch.randn(3, 3, 4), torch.rand(3, 3) > 0.5)


class Keywords(torch.nn.Module):
    def forward(self, pair: Any, scale: float = 2.0, *, bias: torch.Tensor) -> Any:
        return [pair["a"] * scale + pair["b"], (bias.sum(), None)]


class Branch(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


class Half(torch.nn.Module):
    """Tied, half-precision and non-persistent weights, in-place state, data-dependent sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        self.b = self.a
        self.register_buffer("steps", torch.zeros(1), persistent=False)
        self.register_buffer("wide", torch.ones(1).expand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        picked = self.b(self.a(x))[x[:, 0] > 0]
        return picked.float() * self.steps + self.wide.sum() ** 0.5


class Positions(torch.nn.Module):
    """Sizes under division, rounding, maximum and modulo."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        torch._check(n // 2 + 1 < 5000)
        ramp = torch.arange(max(n // 2, 1) + n % 3) / n**0.5
        grown = torch.nn.functional.interpolate(x[:, None].float(), scale_factor=1.5)
        return ramp.sum() + grown.mean() + x[:, : (n + 1) // 2].float().sum()


X = torch.randn(3, 6)


@pytest.mark.filterwarnings("ignore:No complete tensor", "ignore:The tensor attributes")
@pytest.mark.parametrize(
    ("module", "args", "kwargs", "shapes"),
    [
        (Keywords(), ({"a": X, "b": X},), {"bias": X}, None),
        (Branch(), (X,), {}, None),
        (Half(), (torch.randn(3, 4, dtype=torch.bfloat16),), {}, None),
        (Positions(), (X,), {}, ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)),
        (torch.nn.LSTM(6, 5, batch_first=True), (X[None],), {}, None),
        (torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.GELU("tanh")), (X,), {}, None),
        (torch.nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), (X[None],), {}, None),
    ],
    ids=["keywords", "cond", "half", "sizes", "lstm", "gelu", "transformer"],
)
def test_ordinary_programs_are_not_refused(
    tmp_path: Path, module: Any, args: Any, kwargs: Any, shapes: Any
) -> None:
    exported = torch.export.export(module.eval(), args, kwargs, dynamic_shapes=shapes)
    torch.export.save(exported, tmp_path / "m.pt2")
    loaded = load_model(tmp_path / "m.pt2")
    run = loaded.module if loaded.given is None else loaded.given.module
    if loaded.given is not None:  # the program is in float32, and what was given as it was
        assert loaded.module(*loaded.args).dtype == torch.float32
        loaded = replace(loaded, args=args)
    torch.testing.assert_close(
        run(*loaded.args, **loaded.kwargs), exported.module()(*args, **kwargs)
    )


def test_linexport_operators_are_registered_on_demand(tmp_path: Path) -> None:
    torch_ops = pytest.importorskip("linexport.models.torch_ops")
    assert torch_ops

    class Map(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.linexport.feature_map(x[None], [], kind="relu", num_heads=2)

    torch.export.save(torch.export.export(Map(), (X,)), tmp_path / "m.pt2")
    torch.testing.assert_close(load_model(tmp_path / "m.pt2").module(X), X[None].relu())


def test_nan_weights_are_refused(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight[0, 0], layer.weight[1, 1] = float("nan"), float("inf")
    torch.export.save(torch.export.export(layer.eval(), (X[:, :2],)), tmp_path / "m.pt2")
    with pytest.raises(UnsupportedModelError, match=r"m\.pt2: weight has 1 NaN and 1 Inf of 4"):
        load_model(tmp_path / "m.pt2")


def test_a_number_that_is_nan_in_code_is_no_weight(tmp_path: Path) -> None:
    class Filled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.where(x > 9, torch.tensor(float("nan")), x)

    torch.export.save(torch.export.export(Filled().eval(), (X,)), tmp_path / "m.pt2")
    assert torch.equal(load_model(tmp_path / "m.pt2").module(X), X)


def test_training_mode_is_reported(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.5)).train()
    torch.export.save(torch.export.export(module, (X,)), tmp_path / "m.pt2")
    (warning,) = load_model(tmp_path / "m.pt2").warnings
    assert "training mode" in warning
    assert "module.eval()" in warning


def test_missing_example_inputs_are_asked_for(tmp_path: Path) -> None:
    exported = torch.export.export(torch.nn.Linear(6, 6), (X,))
    exported._example_inputs = None
    torch.export.save(exported, tmp_path / "m.pt2")
    with pytest.raises(UnsupportedModelError, match=r"no example inputs.*torch\.export\.export"):
        load_model(tmp_path / "m.pt2")
