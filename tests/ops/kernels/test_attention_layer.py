"""LinearAttention with operands that are expressions, in the interpreter against float64."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from linexport.plugins.kernels.expressions import (
    Convolution,
    Expression,
    Load,
    Number,
    Sum,
    View,
)
from linexport.plugins.kernels.plans.attention_layer import plan
from linexport.plugins.kernels.run import run
from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from linexport.plugins.ops.linear_attention.oracle import linear_attention
from tests.support import ROOT, kernels

pytestmark = pytest.mark.services

KEY_HEADS, HEADS, D_K, D_V, TAPS = 2, 4, 20, 24, 4
VALUES = HEADS * D_V
CHANNELS = 2 * KEY_HEADS * D_K + VALUES


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        return importlib.import_module("gpu.layer")


def evaluated(x: Expression, given: Mapping[str, np.ndarray], heads: int, width: int) -> np.ndarray:
    """The expression in float64: (B, T, heads, width), or with ones in the place of any."""
    if isinstance(x, Number):
        return np.array(x.value).reshape(1, 1, 1, 1)
    if isinstance(x, Load):
        array = given[f"x{x.tensor}"]
        flat = array.reshape(1, 1, -1) if x.width == 0 else array
        return flat[..., places(x.view, heads, width)]
    if isinstance(x, Sum):
        return evaluated(x.operand, given, heads, x.width).sum(-1, keepdims=True) * x.factor
    if isinstance(x, Convolution):
        at = places(x.view, heads, width)
        now = evaluated(x.operand, given, heads, width)
        past = np.moveaxis(given[f"x{x.past}"], -1, 1)[:, :, at]
        seen = np.concatenate([past, now], 1)
        weight = given[f"x{x.weight}"][:, 0][at]
        y = sum(seen[:, j : j + now.shape[1]] * weight[..., j] for j in range(x.size))
        y = y if x.bias is None else y + given[f"x{x.bias}"][at]
        return y / (1 + np.exp(-y))
    functions: dict[str, Any] = {
        "Neg": np.negative,
        "Exp": np.exp,
        "Sqrt": np.sqrt,
        "Reciprocal": np.reciprocal,
        "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "Softplus": lambda x: np.logaddexp(0, x),
        "Add": np.add,
        "Mul": np.multiply,
    }
    return functions[x.kind](*(evaluated(one, given, heads, width) for one in x.operands))


def places(view: View, heads: int, width: int) -> np.ndarray:
    h, i = np.arange(heads)[:, None], np.arange(width)
    return view.offset + h * view.head + i * view.component


def random_tensors(
    shapes: Mapping[str, Any], types: tuple[str, ...], batch: int, length: int
) -> dict[str, torch.Tensor]:
    sizes, rng = {"B": batch, "T": length}, np.random.default_rng(length)
    found = {}
    for (name, shape), kind in zip(shapes.items(), types, strict=True):
        x = torch.from_numpy(rng.normal(size=[sizes.get(n, n) for n in shape]))
        found[name] = x.to(kernels.ELEMENTS[kind])
    return found


@pytest.mark.parametrize(
    ("length", "dtype"),
    [
        *((length, "float32") for length in (0, 1, 2, 4, 5, 40, 260)),
        *((length, dtype) for length in (2, 20) for dtype in ("float16", "bfloat16")),
    ],
)
def test_equals_the_oracle_of_operands_and_attention(
    tool: ModuleType, length: int, dtype: str
) -> None:
    """One kernel up to four tokens; in chunks and segments; the states of both go on."""
    layer, shapes = tool.gated_delta_layer(dtype, D_K, D_V, KEY_HEADS, HEADS, bias=length % 2 == 0)
    batch = 1 if length > 5 else 2
    spec = LinearAttentionSpec.from_attributes(dict(layer.attention.attributes))
    given = random_tensors(shapes, layer.types, batch, length)
    rng = np.random.default_rng(1)
    past = torch.from_numpy(rng.normal(size=(batch, HEADS, D_K, D_V))).float()
    mask = torch.from_numpy(rng.random((batch, length)) < 0.8)
    wide = {name: kernels.wide(x) for name, x in given.items()}
    counts = {"query": KEY_HEADS, "key": KEY_HEADS, "value": HEADS, "decay": HEADS, "beta": HEADS}
    operands = {}
    for name, heads in counts.items():
        width = {"query": D_K, "key": D_K, "value": D_V}.get(name, 1)
        x = evaluated(layer.operands[name], wide, heads, width)
        operands[name] = np.broadcast_to(x, (batch, length, heads, width)).reshape(
            batch, length, heads * width
        )
    wanted = linear_attention(
        spec, **operands, past_state=kernels.wide(past), key_mask=mask.numpy()
    )
    convolved = np.concatenate([wide["x3"], np.moveaxis(wide["x0"][..., :CHANNELS], 1, 2)], 2)[
        ..., -(TAPS - 1) :
    ]
    own = getattr(torch, dtype)
    out = {
        "output": torch.full((batch, length, VALUES), np.nan, dtype=own),
        "present_state": past,
        "present_conv_0": torch.full((batch, CHANNELS, TAPS - 1), np.nan),
    }
    tensors = {**given, "past_state": past, "key_mask": mask, **out}
    state = past.clone()
    run(
        plan(layer, dtype, 90, "ieee"),
        {**tensors, "past_state": state, "present_state": state},
        batch,
        length,
        multiprocessors=64 if length > 200 else 1,
    )
    got = [kernels.wide(x) for x in (out["output"], state, out["present_conv_0"])]
    scale = (np.maximum(np.abs(wanted[0]), 1.0), np.maximum(np.abs(wanted[1]), 1.0), convolved)
    kernels.assert_close(got, (wanted[0], wanted[1], convolved), scale, kernels.TOLERANCE[dtype])
