"""Activations of 16 bits in the CPU library: those of float32, rounded; states stay in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto

from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from tests.support.layouts import SEQUENCES, Layout
from tests.support.native import on_library, one_node
from tests.support.runtimes import Arrays

KINDS = {
    "float16": (np.float16, TensorProto.FLOAT16),
    "bfloat16": (ml_dtypes.bfloat16, TensorProto.BFLOAT16),
}
CONVOLUTION = {"input": ("B", 3, "T"), "weight": (3, 1, 4), "bias": (3,), "past_state": ("B", 3, 3)}
DELTA_RULE = dict.fromkeys(("query", "key", "value", "decay", "a", "b"), ("B", "T", 12))


def nearest(x: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded to 16 bits, in float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x).astype(KINDS[dtype][0]).astype(np.float32)


def drawn(seed: int, shapes: dict[str, Any], dtype: str, length: int) -> Arrays:
    rng, sizes = np.random.default_rng(seed), {"B": 2, "T": length}
    return {
        name: nearest(rng.normal(size=[sizes.get(n, n) for n in shape]), dtype)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize("length", [0, 1, 40])
def test_linear_attention(dtype: str, rule: str, length: int) -> None:
    """The very bits: the same kernel computes both."""
    spec = LinearAttentionSpec(4, 2, rule, normalize=not rule.endswith("delta"), eps=0.25)
    layout = Layout(spec, 1, 9, 33, past=True, masked=True, dtype=dtype)
    x = layout.inputs(np.random.default_rng(0), 2, length)
    x = {n: v.astype(np.float32) if n in SEQUENCES else v for n, v in x.items()}
    output, *states = on_library(replace(layout, dtype="float32").model(), threads=2)(x)
    got, *present = on_library(layout.model(), threads=2)(x)
    np.testing.assert_array_equal(got, nearest(output, dtype))
    for one, two in zip(present, states, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(
    "op, shapes, outputs, attributes",
    [
        ("CausalConvWithState", CONVOLUTION, ("output", "present_state"), {"activation": "silu"}),
        ("GeneralizedDeltaRule", DELTA_RULE, ("output", "present_state"), {"num_heads": 3}),
    ],
)
def test_other_operators(
    dtype: str,
    op: str,
    shapes: dict[str, Any],
    outputs: tuple[str, ...],
    attributes: dict[str, Any],
) -> None:
    x = drawn(1, shapes, dtype, 9)
    x |= {n: x[n] / 10 for n in ("decay", "a", "b") if n in x}
    x = {n: nearest(v, dtype) for n, v in x.items()}
    want = on_library(one_node(op, shapes, outputs, **attributes))(x)
    got = on_library(one_node(op, shapes, outputs, KINDS[dtype][1], **attributes))(x)
    np.testing.assert_array_equal(got[0], nearest(want[0], dtype))
    present = nearest(want[1], dtype) if op == "CausalConvWithState" else want[1]
    np.testing.assert_array_equal(got[1], present)


@pytest.mark.parametrize("dtype", KINDS)
def test_every_number(dtype: str) -> None:
    """All of 16 bits there and back, and products that lie between two: subnormal, too large."""
    every = np.arange(2**16, dtype=np.uint16).view(KINDS[dtype][0]).astype(np.float32)
    factors = nearest(np.array([1.0, 1.0009765625, 0.3, 3e-4, 700.0]), dtype)
    shapes = {"input": (1, len(factors), "T"), "weight": (len(factors), 1, 1)}
    model = one_node("CausalConvWithState", shapes, ("output",), KINDS[dtype][1])
    x = {"input": np.stack([every] * len(factors))[None], "weight": factors[:, None, None]}
    (got,) = on_library(model, threads=2)(x)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(got[0], nearest(x["input"][0] * factors[:, None], dtype))
