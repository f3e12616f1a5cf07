"""LinearAttention with operands that are expressions, in the interpreter against float64."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from linexport.errors import UnsupportedModelError
from linexport.plugins.kernels.expressions import (
    Convolution,
    Expression,
    Load,
    Number,
    Sum,
    View,
)
from linexport.plugins.kernels.plans.attention_layer import ROWS, plan
from linexport.plugins.kernels.run import run
from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from linexport.plugins.ops.linear_attention.oracle import linear_attention
from tests.support import ROOT, kernels

pytestmark = pytest.mark.services

D_K, D_V = 20, 24


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
    ("length", "dtype", "taps"),
    [
        *((length, "float32", 4) for length in (0, 1, 2, 4)),
        *(pytest.param(n, "float32", 4, marks=pytest.mark.slow) for n in (5, 40, 260)),
        (2, "bfloat16", 4),
        pytest.param(20, "bfloat16", 4, marks=pytest.mark.slow),
        *(pytest.param(n, "float16", 4, marks=pytest.mark.slow) for n in (2, 20)),
        (20, "float32", 4),
        pytest.param(20, "float32", 11, marks=pytest.mark.slow),
    ],
)
def test_equals_the_oracle_of_operands_and_attention(
    tool: ModuleType, length: int, dtype: str, taps: int
) -> None:
    """One kernel up to four tokens; in chunks and segments; the states of both go on.

    Eleven taps see the past from more than one of the blocks that operands are written in.
    """
    assert (taps > ROWS) == (taps == 11)
    batch = 1 if length > 5 else 2
    shared, heads = (1, 2) if length > 200 else (2, 4)
    values = heads * D_V
    channels = 2 * shared * D_K + values
    layer, shapes = tool.gated_delta_layer(
        dtype, D_K, D_V, shared, heads, bias=length % 2 == 0, taps=taps
    )
    spec = LinearAttentionSpec.from_attributes(dict(layer.attention.attributes))
    given = random_tensors(shapes, layer.types, batch, length)
    rng = np.random.default_rng(1)
    past = torch.from_numpy(rng.normal(size=(batch, heads, D_K, D_V))).float()
    mask = torch.from_numpy(rng.random((batch, length)) < 0.8)
    wide = {name: kernels.wide(x) for name, x in given.items()}
    counts = {"query": shared, "key": shared, "value": heads, "decay": heads, "beta": heads}
    operands = {}
    for name, count in counts.items():
        width = {"query": D_K, "key": D_K, "value": D_V}.get(name, 1)
        x = evaluated(layer.operands[name], wide, count, width)
        operands[name] = np.broadcast_to(x, (batch, length, count, width)).reshape(
            batch, length, count * width
        )
    wanted = linear_attention(
        spec, **operands, past_state=kernels.wide(past), key_mask=mask.numpy()
    )
    convolved = np.concatenate([wide["x3"], np.moveaxis(wide["x0"][..., :channels], 1, 2)], 2)[
        ..., -(taps - 1) :
    ]
    own = getattr(torch, dtype)
    out = {
        "output": torch.full((batch, length, values), np.nan, dtype=own),
        "present_state": past,
        "present_conv_0": torch.full((batch, channels, taps - 1), np.nan),
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


def test_a_layer_with_a_feature_map_is_refused(tool: ModuleType) -> None:
    layer, _ = tool.gated_delta_layer("float32", D_K, D_V, 1, 2)
    attributes = {**layer.attention.attributes, "feature_map": "relu"}
    mapped = replace(layer, attention=replace(layer.attention, attributes=attributes))
    with pytest.raises(UnsupportedModelError, match="has the feature map 'relu'; the kernels take"):
        plan(mapped, "float32", 90)
