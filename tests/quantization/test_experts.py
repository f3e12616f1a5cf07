"""Quantised experts: ONNX Runtime's kernel against the op's definition with the same matrices."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from linexport.plugins.ops.mixture_of_experts import INPUTS, ExpertFunction, mixture_of_experts
from linexport.plugins.ops.op import DOMAIN
from linexport.quantization.block_quantisation import Grid, nearest
from linexport.quantization.choose_bits import Chosen
from linexport.quantization.experts import find_experts
from linexport.quantization.quantisable import Weight
from linexport.quantization.rewrite import float_activations, quantised_model

E, K = 6, 2
Arrays = dict[str, np.ndarray]


def model_of(weights: Arrays, function: ExpertFunction) -> onnx.ModelProto:
    """One node of experts; its weights are initializers without values."""
    node = helper.make_node(
        "MixtureOfExperts",
        list(INPUTS),
        ["y"],
        domain=DOMAIN,
        **{**asdict(function), "gated": int(function.gated)},
    )
    kinds = {"x": TensorProto.FLOAT, "index": TensorProto.INT64, "weight": TensorProto.FLOAT}
    sizes = {"x": weights["up"].shape[2], "index": K, "weight": K}
    typed = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "experts",
        [typed(name, kinds[name], ["n", sizes[name]]) for name in kinds],
        [typed("y", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def drawn(width: int, inner: int, gated: bool) -> Arrays:
    random = np.random.default_rng(width + inner)
    shapes = {"up": (E, inner * (1 + gated), width), "down": (E, width, inner)}
    return {
        name: (random.standard_normal(shape) / shape[2] ** 0.5).astype(np.float32)
        for name, shape in shapes.items()
    }


def routed(width: int, tokens: int = 9) -> Arrays:
    random = np.random.default_rng(tokens)
    return {
        "x": random.standard_normal((tokens, width)).astype(np.float32),
        "index": random.random((tokens, E)).argsort(1)[:, :K].astype(np.int64),
        "weight": random.random((tokens, K)).astype(np.float32),
    }


def check(weights: Arrays, function: ExpertFunction, bits: int, given: Arrays) -> list[Weight]:
    """Compare with the op's definition in float64; returns the weights."""
    model = model_of(weights, function)
    found, kept = find_experts(model, weights)
    assert not kept and [w.name for w in found] == ["up", "down"]
    made = {
        w.name: Chosen(w, nearest(w.matrix(weights[w.name]), Grid(bits, w.block)), "nearest")
        for w in found
    }
    matrices = {n: c.quantised.matrix().reshape(weights[n].shape) for n, c in made.items()}
    wide = {n: a if n == "index" else a.astype(np.float64) for n, a in given.items()}
    expected = mixture_of_experts(function, **wide, **matrices)
    quantised = quantised_model(model, made)
    assert not {t.name for t in quantised.graph.initializer} & weights.keys()
    for written, limit in ((float_activations(quantised), 1e-5), (quantised, 0.03)):
        session = onnxruntime.InferenceSession(written.SerializeToString())
        [y] = session.run(None, given)
        assert np.abs(y - expected).max() < limit * np.abs(expected).max()
    return found


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("width", "inner", "gated"), [(64, 96, True), (64, 48, True), (32, 32, False)]
)
def test_the_kernel_computes_the_op_with_the_quantised_matrices(
    width: int, inner: int, gated: bool, bits: int
) -> None:
    found = check(drawn(width, inner, gated), ExpertFunction("silu", gated), bits, routed(width))
    assert all(w.experts and w.experts.fused for w in found)
    assert {w.block for w in found} == {16 if inner % 32 else 32}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("width", "inner", "function", "tokens"),
    [
        (64, 96, ExpertFunction("relu2", False), 9),
        (64, 48, ExpertFunction("gelu", True), 9),
        (64, 64, ExpertFunction("gelu", False), 1),
        (32, 32, ExpertFunction("relu2", True), 1),
        (40, 24, ExpertFunction("silu", True), 9),
        (64, 64, ExpertFunction("silu", True, 0.5, 0.25), 9),
    ],
)
def test_products_compute_what_the_kernel_does_not_have(
    width: int, inner: int, function: ExpertFunction, tokens: int, bits: int
) -> None:
    """Shares may be negative, and with one token most experts have no rows."""
    given = routed(width, tokens)
    given["weight"][0, 0] *= -1
    found = check(drawn(width, inner, function.gated), function, bits, given)
    assert not any(w.experts and w.experts.fused for w in found)


def test_experts_narrower_than_a_block_stay() -> None:
    weights = drawn(32, 8, False)
    found, kept = find_experts(model_of(weights, ExpertFunction("relu2", False)), weights)
    assert not found and [k.name for k in kept] == ["up", "down"]
    assert all(k.reason == "8 inputs, fewer than the smallest block has" for k in kept)
