"""An ONNX graph in float64, or in float32 where it has half precision: what rounding loses."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import parser

from linexport.errors import UnsupportedModelError
from linexport.graph.retyped import retyped
from linexport.sources.onnx_file import module
from linexport.sources.onnx_file.module import OnnxModule

MAPS = """
<ir_version: 10, opset_import: ["": 20, "local": 1]>
g (float[B, T, 4] x) => (float[B, T, 4] y, int64[3] shape)
<float[4] weight = {0.1, 0.2, 0.3, 0.4}>
{
    elu = Elu <alpha = 0.7> (x)
    one = Constant <value_float = 1.0> ()
    soft = local.Soft (x)
    positive = Greater (one, one)
    chosen = If (positive) <
        then_branch = a () => (float[B, T, 4] t) { t = Identity (elu) },
        else_branch = b () => (float[B, T, 4] e)
        { c = Constant <value = float {0.1}> () e = Mul (elu, c) }
    >
    scaled = Mul (chosen, weight)
    sum = Add (scaled, soft)
    y = Cast <to = 1> (sum)
    shape = Shape (y)
}
<domain: "local", opset_import: ["": 20]>
Soft (x) => (y) { y = Softplus (x) }
"""

CONV = """
<ir_version: 10, opset_import: ["": 20]>
g (float[1, 2, T] x) => (float[1, 3, T] y)
<float[3, 2, 1] w = {1, 2, 3, 4, 5, 6}>
{ y = Conv (x, w) }
"""


def saved(text: str, folder: Path) -> OnnxModule:
    model = parser.parse_model(text)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, folder / "model.onnx")
    return OnnxModule(folder / "model.onnx", model)


def test_everything_in_float32_becomes_float64(tmp_path: Path) -> None:
    """Constants of subgraphs and functions too, with the digits that float32 has of them."""
    original = saved(MAPS, tmp_path)
    double = copy.deepcopy(original).to(torch.float64)
    x = np.random.default_rng(0).standard_normal((2, 5, 4)) * 30
    y, shape = double(torch.from_numpy(x))
    weight = np.float32([0.1, 0.2, 0.3, 0.4]).astype(np.float64) * np.float64(np.float32(0.1))
    alpha = np.float64(np.float32(0.7))
    elu = np.where(x < 0, alpha * np.expm1(np.minimum(x, 0)), x)
    expected = elu * weight + np.logaddexp(x, 0)
    assert y.dtype == torch.float64 and shape.tolist() == [2, 5, 4]
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-13, atol=1e-13)
    [single, _] = original(torch.from_numpy(x))  # as it was
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_run_in_float64_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"does not run the graph in float64.*Conv"):
        copy.deepcopy(saved(CONV, tmp_path)).to(torch.float64)
    original = saved(MAPS, tmp_path)
    with pytest.raises(UnsupportedModelError, match="dtypes that its file fixes"):
        copy.deepcopy(original).to(torch.float16)
    monkeypatch.setattr(module, "LARGEST_WIDENED", 100)
    with pytest.raises(UnsupportedModelError, match="too large"):
        copy.deepcopy(original).to(torch.float64)


QUANTISED = """
<ir_version: 10, opset_import: ["": 21]>
g (float[B, 4] x) => (float[B, 3] y, uint8[B, 4] q)
<float scale = {0.1}, int8 zero = {3}, int8[4, 3] w = {9, -8, 7, 6, 5, -4, 3, 2, 1, 0, -1, -2},
 float[3] scales = {0.3, 0.5, 0.7}>
{
    x8 = QuantizeLinear (x, scale, zero)
    back = DequantizeLinear (x8, scale, zero)
    weight = DequantizeLinear <axis = 1> (w, scales)
    y = MatMul (back, weight)
    q, step, offset = DynamicQuantizeLinear (x)
    restored = DequantizeLinear (q, step, offset)
    z = Add (restored, x)
}
"""


def test_quantised_operators_have_a_float64_reference(tmp_path: Path) -> None:
    """Quantised in float32, as the file says, and added up in float64."""
    original = saved(QUANTISED, tmp_path)
    x = np.random.default_rng(1).standard_normal((50, 4)).astype(np.float32) * 9
    y, q = copy.deepcopy(original).to(torch.float64)(torch.from_numpy(x).double())
    scale, scales = np.float32(0.1), np.float32([0.3, 0.5, 0.7])
    levels = np.clip(np.round(x / scale) + 3, -128, 127) - 3
    stored = np.array([[9, -8, 7], [6, 5, -4], [3, 2, 1], [0, -1, -2]], np.float32) * scales
    expected = (levels.astype(np.float32) * scale).astype(np.float64) @ stored.astype(np.float64)
    assert y.dtype == torch.float64 and q.dtype == torch.uint8
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-13, atol=1e-13)


HALF = """
<ir_version: 10, opset_import: ["": 20]>
g (float16[B, 4] x) => (float16[B, 4] y)
{ a = Mul (x, w) b = Cast <to = 1> (a) c = Exp (b) d = Cast <to = 10> (c) y = Add (d, x) }
"""


@pytest.mark.parametrize("beside", [False, True])
def test_a_file_in_half_precision_is_run_in_three_precisions(tmp_path: Path, beside: bool) -> None:
    model, path = parser.parse_model(HALF), tmp_path / "half.onnx"
    weight = np.float16([0.1, 0.2, 0.3, 0.4])
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, path, save_as_external_data=beside, location="w", size_threshold=0)
    original = OnnxModule(path, onnx.load(path, load_external_data=False))
    x = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float16)
    exact = np.exp(x.astype(np.float64) * weight.astype(np.float64)) + x
    errors = []
    for dtype in (torch.float16, torch.float32, torch.float64):
        module = original if dtype == torch.float32 else copy.deepcopy(original).to(dtype)
        [y] = module(torch.from_numpy(x).to(dtype))
        assert y.dtype == dtype
        errors.append(float(np.abs(y.numpy() - exact).max()))
    assert 1e-4 < errors[0] < 5e-3 and 1e-9 < errors[1] < 1e-6 and errors[2] < 1e-14


def test_a_file_in_bfloat16_is_run_in_float32(tmp_path: Path) -> None:
    text = """
    <ir_version: 10, opset_import: ["": 20]>
    g (bfloat16[B, 4] x) => (bfloat16[B, 4] y)
    { f = Constant <value_float = 1.0> () one = Cast <to = 16> (f) y = Add (x, one) }
    """
    [y] = saved(text, tmp_path)(torch.full((2, 4), 2.0**-20))
    assert y.dtype == torch.float32 and (y == 1 + 2.0**-20).all()


def test_a_value_without_a_type_has_none_afterwards() -> None:
    model = parser.parse_model(MAPS)
    model.graph.value_info.append(onnx.ValueInfoProto(name="soft"))
    wide = retyped(model, {onnx.TensorProto.FLOAT16: onnx.TensorProto.FLOAT})
    assert not wide.graph.value_info[0].HasField("type")
