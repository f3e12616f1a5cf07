"""Causal convolution and feature maps on their own, in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linexport.errors import UnsupportedModelError
from linexport.plugins.kernels.plan import plan_launches
from linexport.plugins.kernels.run import run
from linexport.plugins.ops.causal_conv_tokens import causal_conv_tokens
from linexport.plugins.ops.op import Node
from tests.support import kernels

DTYPES = ("float32", "float16", "bfloat16")


def conv_plan(x: dict[str, torch.Tensor], dtype: str, silu: bool) -> Any:
    names = ("input", "weight", "bias", "past_state")
    shapes: dict[str, Any] = {n: tuple(x[n].shape) for n in names if n in x}
    attributes = {"activation": "silu" if silu else "none"}
    inputs = tuple(n if n in x else "" for n in names)
    return plan_launches(Node("CausalConvTokens", attributes, inputs, shapes), dtype, 90)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_convolution_equals_the_oracle(dtype: str, data: Any) -> None:
    """Any kernel size and length, shorter than the kernel too; in place where there is a past."""
    batch, channels, size = (data.draw(st.integers(1, n)) for n in (2, 19, 5))
    length = data.draw(st.integers(0, 300))
    silu, bias, past, in_place = (data.draw(st.booleans()) for _ in range(4))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    shapes = {"input": (batch, length, channels), "weight": (channels, 1, size)}
    if bias:
        shapes["bias"] = (channels,)
    if past:
        shapes["past_state"] = (batch, channels, size - 1)
    kind = getattr(torch, dtype)
    x = {
        n: torch.from_numpy(rng.normal(size=s)).to(torch.float32 if n == "past_state" else kind)
        for n, s in shapes.items()
    }
    arrays = {n: kernels.wide(v) for n, v in x.items()}
    activation = "silu" if silu else "none"
    want = causal_conv_tokens(
        activation, *(arrays.get(n) for n in ("input", "weight", "bias", "past_state"))
    )
    terms = causal_conv_tokens(
        "none",
        *(
            None if n not in arrays else np.abs(arrays[n])
            for n in ("input", "weight", "bias", "past_state")
        ),
    )
    chosen = conv_plan(x, dtype, silu)
    x["output"] = torch.full(shapes["input"], np.nan, dtype=kind)
    x["present_state"] = torch.full((batch, channels, size - 1), np.nan)
    if past and in_place:
        x["present_state"] = x["past_state"]
    run(chosen, x, batch, length, 1)
    got = [kernels.wide(x[n]) for n in ("output", "present_state")]
    kernels.assert_close(got, want, terms, kernels.TOLERANCE[dtype])


def test_the_first_block_alone_touches_the_past() -> None:
    """It reads the past and writes the present, so that they may be one memory."""
    rng = np.random.default_rng(0)
    shapes = {"input": (1, 700, 3), "weight": (3, 1, 4), "past_state": (1, 3, 3)}
    x = {n: torch.from_numpy(rng.normal(size=s)).float() for n, s in shapes.items()}
    chosen = conv_plan(x, "float32", False)
    assert chosen.symbols(1, 700, 1)["chunks"] > 1
    arrays = {n: kernels.wide(v).copy() for n, v in x.items()}
    want = causal_conv_tokens("none", arrays["input"], arrays["weight"], None, arrays["past_state"])
    x["output"], x["present_state"] = torch.empty(shapes["input"]), x["past_state"]
    run(chosen, x, 1, 700, 1)
    got = [kernels.wide(x[n]) for n in ("output", "present_state")]
    kernels.assert_close(got, want, want, 1e-6)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("size", [1, 4, 9])
def test_convolution_of_few_times_in_place(size: int, length: int) -> None:
    rng = np.random.default_rng(1)
    shapes = {
        "input": (2, length, 300), "weight": (300, 1, size), "past_state": (2, 300, size - 1)
    }  # fmt: skip
    x = {n: torch.from_numpy(rng.normal(size=s)).float() for n, s in shapes.items()}
    want = causal_conv_tokens("silu", *(kernels.wide(x[n]) for n in ("input", "weight")), None,
                       kernels.wide(x["past_state"]).copy())  # fmt: skip
    chosen = conv_plan(x, "float32", True)
    assert (chosen.route(2, length, 1) is chosen.decode) == (length < 5)
    x["output"] = torch.full(shapes["input"], np.nan)
    x["present_state"] = x["past_state"]
    run(chosen, x, 2, length, 1)
    got = [kernels.wide(x[n]) for n in ("output", "present_state")]
    kernels.assert_close(got, want, want, 1e-6)


def test_a_step_of_a_convolution_is_few_blocks() -> None:
    shapes: dict[str, Any] = {"input": ("B", "T", 2048), "weight": (2048, 1, 4)}
    node = Node("CausalConvTokens", {"activation": "silu"}, tuple(shapes), shapes)
    chosen = plan_launches(node, "bfloat16", 90)
    values = chosen.symbols(256, 1, 132)
    blocks = {
        name: math.prod(e.of(values) for e in route.launches[0].grid)
        for name, route in (("single", chosen.single), ("decode", chosen.route(256, 1, 132)))
    }
    assert blocks == {"single": 8_192, "decode": 2_048}


def mapped(kind: str, dtype: str, log: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features of five heads by the kernel, or their logarithms, and features by the formula.

    A chunk of so many heads fills the largest block of rows, and part of another.
    """
    width, features, phi, parameter = kernels.maps()[kind]
    heads, batch, length = 5, 2, 37
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(batch, length, heads * width)))
    x = x.to(getattr(torch, dtype))
    shapes: dict[str, Any] = {"x": ("B", "T", heads * width)}
    names, tensors = ["x"], {"x": x}
    if parameter is not None:
        names, shapes["parameter_0"] = ["x", "parameter_0"], parameter.shape
        tensors["parameter_0"] = torch.from_numpy(parameter.astype(np.float32))
    attributes = {"kind": kind.removesuffix("+c"), "num_heads": heads, "log": log}
    node = Node("FeatureMap", attributes, tuple(names), shapes)
    given = torch.float32 if log else x.dtype
    tensors["y"] = torch.full((batch, length, heads * features), np.nan, dtype=given)
    run(plan_launches(node, dtype, 90, "ieee"), tensors, batch, length, 1)
    split = kernels.wide(x).reshape(batch, length, heads, width)
    return kernels.wide(tensors["y"]), phi(split).reshape(batch, length, -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind", ["identity", "relu", "elu1", "exp", "taylor2", "quadratic", "quadratic+c", "favor+"]
)
def test_feature_map_equals_its_formula(kind: str, dtype: str) -> None:
    found, wanted = mapped(kind, dtype)
    kernels.assert_close([found], (wanted,), (wanted,), kernels.TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_logarithms_of_features_have_all_digits_of_float32(dtype: str) -> None:
    """Whatever the type of x is."""
    found, features = mapped("favor+", dtype, log=1)
    np.testing.assert_allclose(found, np.log(features), rtol=1e-6, atol=1e-6)


def in_tensorfloat32(x: np.ndarray) -> np.ndarray:
    """Round as cvt.rna does: to eleven digits, half away from zero."""
    return ((np.float32(x).view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)


def in_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to eight digits."""
    return np.float32(x).astype(ml_dtypes.bfloat16).astype(np.float32)


def parts(x: np.ndarray, round_: Callable[[np.ndarray], np.ndarray], n: int) -> list[np.ndarray]:
    """The first n terms of x, each the rounded rest of those before it; in float64."""
    found, rest = [], np.float32(x)
    for _ in range(n):
        found.append(round_(rest).astype(np.float64))
        rest = rest - np.float32(found[-1])
    return found


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_exponents_in_bfloat16_are_as_exact_as_in_tensorfloat32(dtype: str) -> None:
    """What tensor cores round, which the interpreter does not: factors, not products.

    float32 has two terms of each factor in TensorFloat-32, of the scaled x, and no product of the
    two smaller ones; here x is as it is, of w there are three, and the smallest are left out.
    """
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(64, 128))).to(getattr(torch, dtype))
    x, w = x.double().numpy(), np.float32(rng.normal(size=(128, 64))).astype(np.float64)
    scale = 128**-0.25
    exact = scale * (x @ w)
    (xh, xl), (wh, wl) = (parts(a, in_tensorfloat32, 2) for a in (x * scale, w))
    tensorfloat32 = xl @ wh + xh @ wl + xh @ wh
    (x1, x2), (high, middle, low) = parts(x, in_bfloat16, 2), parts(w, in_bfloat16, 3)
    np.testing.assert_array_equal(x1 + x2, x)
    if dtype == "bfloat16":
        assert not x2.any()
    bfloat16 = x1 @ low + x2 @ middle + x1 @ middle + x2 @ high + x1 @ high
    errors = [np.abs(found - exact).max() for found in (scale * bfloat16, tensorfloat32)]
    assert errors[0] <= errors[1] < 1e-5


def test_logarithms_of_other_maps_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"map 'exp'; there is one for favor\+"):
        mapped("exp", "float32", log=1)
