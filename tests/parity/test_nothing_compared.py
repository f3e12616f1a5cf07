"""A comparison of nothing is neither a failure of the artifact nor a success."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import linexport
from linexport.conversion.context import Checks
from linexport.conversion.pipeline import convert_checked
from linexport.errors import NothingComparedError, UnsupportedModelError
from linexport.manifest import ConvertOptions, Manifest
from linexport.parity.check import require_compared
from linexport.parity.reference.module import Reference
from linexport.sources.factory import load_module

pytestmark = pytest.mark.usefixtures("one_thread")

X = (torch.randn(2, 6, 4),)


class Undefined(nn.Module):
    """One output that is defined, and one that is NaN whatever its input."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.both = both

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        nothing = (-1 - x * x).log()
        return (x.exp(), nothing) if self.both else (nothing,)


def converted(module: nn.Module, place: Path) -> Manifest:
    loaded = load_module((module, X), "own:make")
    options = ConvertOptions(bench=False, threads=1)
    return convert_checked(loaded, place, options, Checks())


@pytest.mark.parametrize("both", [False, True])
def test_outputs_that_are_nan_everywhere_are_no_success(both: bool, tmp_path: Path) -> None:
    with pytest.raises(NothingComparedError, match=r"Nothing of the output .* NaN") as refused:
        converted(Undefined(both), tmp_path / "out")
    assert refused.value.exit_code == 4 and not (tmp_path / "out").exists()


def test_an_original_that_fails_in_every_case_is_no_failure_of_the_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("on its own")

    monkeypatch.setattr(Reference, "__call__", fail)
    with pytest.raises(NothingComparedError, match=r"itself fails in float32 .*on its own"):
        converted(nn.Linear(4, 3), tmp_path / "out")
    assert not (tmp_path / "out").exists()


class OfFloat32(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise AssertionError
        return x.cumsum(1)


def test_an_assertion_without_text_is_named_by_its_line(tmp_path: Path) -> None:
    found = converted(OfFloat32(), tmp_path / "out")
    (said,) = [w for w in found.warnings if "fails in float64" in w]
    line = inspect.getsourcelines(OfFloat32)[1] + 3
    assert f": AssertionError, at {Path(__file__).name}:{line}: raise AssertionError" in said


def test_validate_changes_nothing_where_nothing_is_compared(
    converted: Callable[..., Path],
    factories: SimpleNamespace,
    cli: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("on its own")

    artifact = converted("masked")
    before = (artifact / "manifest.json").read_bytes()
    monkeypatch.setattr(Reference, "__call__", fail)
    done = cli("validate", str(artifact), "--source", factories.source("masked"), "--json")
    assert done.code == 4 and "on its own" in done.json()["message"]
    assert (artifact / "manifest.json").read_bytes() == before


def test_every_output_has_to_be_compared() -> None:
    require_compared(["a", "b"], {"a", "b"}, [])
    with pytest.raises(NothingComparedError, match=r"output b .* As it is\. "):
        require_compared(["a", "b"], {"a"}, ["As it is.", "As it is."])


@pytest.mark.parametrize("constant", [False, True])
def test_a_file_with_a_weight_that_is_nan_is_refused(constant: bool, tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.float32([[1, np.nan], [2, 3]]), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    if constant:
        nodes.insert(0, helper.make_node("Constant", [], ["w"], value=weight))
    x, y = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", "seq", 2]) for n in ("x", "y")
    )
    graph = helper.make_graph(nodes, "g", [x], [y], [] if constant else [weight])
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "m.onnx")
    with pytest.raises(UnsupportedModelError, match=r"w has 1 NaN of 4 values"):
        linexport.convert(tmp_path / "m.onnx", tmp_path / "out", bench=False)
