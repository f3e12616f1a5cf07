"""An ONNX graph in float64: the reference of what its float32 loses to rounding."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import parser

from linexport.errors import UnsupportedModelError
from linexport.loaders.onnx_file import module
from linexport.loaders.onnx_file.module import OnnxModule

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
    return OnnxModule(folder / "model.onnx")


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
