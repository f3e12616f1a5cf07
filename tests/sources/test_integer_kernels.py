"""The warning on a quantised file that ONNX Runtime computes otherwise than its operators say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import parser

from linexport.sources import load_model
from linexport.sources.onnx_file import integer_kernels

FILE = """
<ir_version: 9, opset_import: ["": 17]>
g (float[B, 64] x) => (float[B, 8] y)
<float scale = {0.05}, int8 zero = {0}, float step = {0.02}, float wide = {1.0}>
{
    x8 = QuantizeLinear (x, scale, zero)
    back = DequantizeLinear (x8, scale, zero)
    weight = DequantizeLinear (w, step, zero)
    product = MatMul (back, weight)
    y8 = QuantizeLinear (product, wide, zero)
    y = DequantizeLinear (y8, wide, zero)
}
"""


def file(folder: Path, branch: bool = False) -> Path:
    model = parser.parse_model(FILE)
    weight = np.random.default_rng(0).integers(-127, 128, (64, 8)).astype(np.int8)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    if branch:
        body = parser.parse_graph("b () => (float[B, 8] z) { z = Neg (y) }")
        true = onnx.helper.make_node("Constant", [], ["c"], value_int=1)
        cast = onnx.helper.make_node("Cast", ["c"], ["b"], to=onnx.TensorProto.BOOL)
        chosen = onnx.helper.make_node("If", ["b"], ["n"], then_branch=body, else_branch=body)
        model.graph.node.extend([true, cast, chosen])
        model.graph.output[0].name = "n"
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


def far(path: Path, fed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"y": np.ones((len(fed["x"]), 8), np.float32) * 77}


def test_the_reference_computes_what_the_operators_say(tmp_path: Path) -> None:
    """On a CPU whose integer kernels saturate too."""
    loaded = load_model(file(tmp_path))
    x = np.random.default_rng(1).standard_normal((99, 64)).astype(np.float32) * 9
    weight = onnx.numpy_helper.to_array(onnx.load(tmp_path / "m.onnx").graph.initializer[-1])
    levels = np.clip(np.round(x / np.float32(0.05)), -128, 127) * 0.05
    expected = np.clip(levels @ (weight * 0.02), -128, 127)
    [y] = loaded.module(torch.from_numpy(x))
    assert np.abs(y.numpy() - expected).max() <= 0.5 + 1e-3


def test_a_distance_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer_kernels, "run_by_default", far)
    [warning] = load_model(file(tmp_path)).warnings
    assert "integer kernels" in warning and "session.disable_quant_qdq = 1" in warning


def test_equal_values_are_not_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file(tmp_path)
    monkeypatch.setattr(integer_kernels, "run_by_default", lambda path, fed: {})
    assert load_model(path).warnings == ()


def test_a_file_with_bodies_is_not_opened_with_integer_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime may end the process there."""
    monkeypatch.setattr(integer_kernels, "run_by_default", far)
    assert load_model(file(tmp_path, branch=True)).warnings == ()
