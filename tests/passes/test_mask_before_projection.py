"""Masks of tokens in front of projections."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper, parser

from linexport import passes

PROJECTED = """
<ir_version: 10, opset_import: ["" : 20]>
g (float[b, t, 8] x, bool[b, t, 1] mask) => (float[b, t, WIDTH] y)
<float zero = {0}> { p = MatMul(x, w)  ADDED  y = Where(mask, CHOSEN, zero)  MORE }
"""


def projected(width: int, added: str = "", chosen: str = "p", more: str = "") -> onnx.ModelProto:
    text = PROJECTED.replace("WIDTH", str(width)).replace("ADDED", added).replace("CHOSEN", chosen)
    model = parser.parse_model(text.replace("MORE", more))
    weight = np.random.default_rng(0).standard_normal((8, width)).astype(np.float32)
    bias = np.ones(width, np.float32)
    model.graph.initializer.extend(
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(bias, "bias")]
    )
    return model


def order(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node if n.op_type in ("MatMul", "Where")]


def output(model: onnx.ModelProto, x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(["y"], {"x": x, "mask": mask})[0]
    return found


def test_rows_are_chosen_before_a_projection_and_are_the_same() -> None:
    model = projected(16)
    rewritten = passes.rewrite(model, passes.STATELESS).model
    assert order(model) == ["MatMul", "Where"] and order(rewritten) == ["Where", "MatMul"]
    random = np.random.default_rng(1)
    x = random.standard_normal((3, 5, 8)).astype(np.float32)
    mask = random.random((3, 5, 1)) < 0.5
    x[~mask[..., 0]] = np.nan  # whatever padding holds
    expected = output(model, x, mask)
    np.testing.assert_array_equal(output(rewritten, x, mask), expected)
    assert not expected[~mask[..., 0]].any()


def test_a_mask_may_have_more_rows_than_what_is_projected() -> None:
    model = projected(16)
    model.graph.input[0].CopyFrom(onnx.helper.make_tensor_value_info("x", 1, [1, "t", 8]))
    rewritten = passes.rewrite(model, passes.STATELESS).model
    assert order(rewritten) == ["Where", "MatMul"]
    onnx.shape_inference.infer_shapes(rewritten, strict_mode=True, check_type=True)
    random = np.random.default_rng(2)
    x, mask = random.standard_normal((1, 5, 8)).astype(np.float32), random.random((3, 5, 1)) < 0.5
    np.testing.assert_array_equal(output(rewritten, x, mask), output(model, x, mask))


@pytest.mark.parametrize(
    ("width", "changes"),
    [
        (4, {}),
        (16, {"added": "s = Add(p, bias)", "chosen": "s"}),
        (16, {"more": "z = Neg(p)"}),
    ],
    ids=["narrower", "with a bias", "read elsewhere"],
)
def test_others_are_chosen_behind(width: int, changes: dict[str, str]) -> None:
    model = projected(width, **changes)
    if "more" in changes:
        model.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, None))
    assert order(passes.rewrite(model, passes.STATELESS).model) == ["MatMul", "Where"]
