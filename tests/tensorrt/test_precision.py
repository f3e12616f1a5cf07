"""Half precision goes where an op takes it, and nowhere else."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from linexport.models import feature_maps
from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from linexport.plugins.ops.registry import attach_functions, register_schemas
from linexport.targets.trt.precision import ELEMENTS, half, open_here

TOKENS = ["batch", "seq"]


def model(log: int) -> onnx.ModelProto:
    """favor+ of two heads of 8; its exponents, where ``log`` is 1, are stabilised."""
    feature_maps.kinds()
    register_schemas()

    def value(name: str, width: int) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [*TOKENS, width])

    def node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
        return helper.make_node(op, inputs, outputs, op, domain="linexport", **attributes)

    names = {"kind": "favor+", "num_heads": 2, "log": log}
    nodes = [node("FeatureMap", ["x", "w"], ["features"], **names)]
    if log:
        heads = {"q_num_heads": 2, "k_num_heads": 2}
        nodes.append(node("StabilizedExp", ["features", "features"], ["y", "keys"], **heads))
    else:
        nodes.append(helper.make_node("Identity", ["features"], ["y"]))
    w = numpy_helper.from_array(np.ones((8, 16), np.float32), "w")
    between = [value("features", 32), *([value("keys", 32)] if log else [])]
    graph = helper.make_graph(
        nodes, "one", [value("x", 16)], [value("y", 32)], [w], value_info=between
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("linexport", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize("precision", ELEMENTS)
def test_features_are_halves_and_parameters_are_not(precision: str) -> None:
    made = half(model(log=0), precision)
    (found,) = (n for n in made.graph.node if n.op_type == "FeatureMap")
    assert found.input[0] != "x" and found.input[1] == "w"
    kinds = {i.name: i.type.tensor_type.elem_type for i in made.graph.value_info}
    assert kinds[found.input[0]] == kinds[found.output[0]] == ELEMENTS[precision]
    onnx.checker.check_model(made, full_check=True)


def decayed() -> onnx.ModelProto:
    """Attention of exponential features, whose decays are differences of maxima."""
    made = model(log=1)
    (exponential,) = (n for n in made.graph.node if n.op_type == "StabilizedExp")
    exponential.output.append("decay")
    inputs = ["y", "keys", "v", "", "", "decay"]
    spec = LinearAttentionSpec(2, 2, "gated", normalize=True, eps=1e-6).attributes()
    made.graph.node.append(
        helper.make_node("LinearAttention", inputs, ["z"], "attention", domain="linexport", **spec)
    )
    v, z = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [*TOKENS, 8]) for name in "vz")
    decay = helper.make_tensor_value_info("decay", TensorProto.FLOAT, [*TOKENS, 32])
    made.graph.value_info.extend([decay, made.graph.output.pop()])
    made.graph.input.append(v)
    made.graph.output.append(z)
    return made


@pytest.mark.parametrize("precision", ELEMENTS)
def test_decays_keep_all_digits(precision: str) -> None:
    """Those of StabilizedExp go to the attention as they are; the node is valid, and runs."""
    made = half(decayed(), precision)
    (attention,) = (n for n in made.graph.node if n.op_type == "LinearAttention")
    assert attention.input[5] == "decay"
    rng = np.random.default_rng(0)
    fed = {name: rng.normal(size=(1, 40, 8 if name == "v" else 16)) for name in "xv"}
    fed["x"] *= np.linspace(0.5, 4, 40)[None, :, None]
    fed = {name: x.astype(np.float32) for name, x in fed.items()}
    results = []
    for graph in (decayed(), made):
        attach_functions(graph)
        onnx.checker.check_model(graph, full_check=True)
        results.append(open_here(graph.SerializeToString()).run(fed)["z"])
    error = np.abs(results[1] - results[0]).max() / np.abs(results[0]).max()
    assert error < 1e-3


@pytest.mark.parametrize("precision", ELEMENTS)
def test_exponents_keep_all_digits(precision: str) -> None:
    """StabilizedExp takes float32 only, and a logarithm of features has float32's range."""
    made = half(model(log=1), precision)
    by_type = {n.op_type: n for n in made.graph.node}
    assert by_type["StabilizedExp"].input[0] == by_type["FeatureMap"].output[0]
    kinds = {i.name: i.type.tensor_type.elem_type for i in made.graph.value_info}
    assert kinds[by_type["FeatureMap"].output[0]] == TensorProto.FLOAT
    onnx.checker.check_model(made, full_check=True)


def attending() -> onnx.ModelProto:
    """Scores of a query with keys that were kept and one that is added."""

    def value(name: str, *shape: int | str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    kept, all_keys = ("batch", 2, "past", 8), ("batch", 2, "past + seq", 8)
    nodes = [
        helper.make_node("Exp", ["key"], ["added"]),
        helper.make_node("Concat", ["past_key_0", "added"], ["present_key_0"], axis=2),
        helper.make_node("Transpose", ["present_key_0"], ["across"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["query", "across"], ["scores"]),
    ]
    given = [value("query", "batch", 2, "seq", 8), value("key", "batch", 2, "seq", 8)]
    outputs = [value("scores", "batch", 2, "seq", "past + seq"), value("present_key_0", *all_keys)]
    between = [value("added", "batch", 2, "seq", 8), value("across", "batch", 2, 8, "past + seq")]
    inputs = [*given, value("past_key_0", *kept)]
    graph = helper.make_graph(nodes, "scores", inputs, outputs, value_info=between)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize(
    ("precision", "half_caches", "kind"),
    [
        ("fp16", True, TensorProto.FLOAT16),
        ("fp16", False, TensorProto.FLOAT),
        ("bf16", True, TensorProto.FLOAT),
        ("fp32", True, TensorProto.FLOAT),
    ],
)
def test_keys_are_kept_as_their_products_take_them(
    precision: str, half_caches: bool, kind: int
) -> None:
    made = half(attending(), precision, half_caches=half_caches)
    onnx.checker.check_model(made, full_check=True)
    types = {i.name: i.type.tensor_type.elem_type for i in (*made.graph.input, *made.graph.output)}
    assert types["past_key_0"] == types["present_key_0"] == kind
    assert types["query"] == types["key"] == types["scores"] == TensorProto.FLOAT
    readers = [n.op_type for n in made.graph.node if "present_key_0" in n.input]
    assert readers == ["Transpose"]
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    rng = np.random.default_rng(0)
    x = {name: rng.normal(size=(1, 2, 3, 8)).astype(np.float32) for name in ("query", "key")}
    x["past_key_0"] = rng.normal(size=(1, 2, 5, 8)).astype(dtype)
    found = open_here(made.SerializeToString()).run(x)
    keys = np.concatenate([x["past_key_0"].astype(np.float64), np.exp(x["key"])], 2)
    np.testing.assert_allclose(
        found["present_key_0"], keys, rtol=2e-3 if kind == TensorProto.FLOAT16 else 1e-6, atol=0
    )
    want = x["query"].astype(np.float64) @ keys.swapaxes(2, 3)
    bound = {"fp16": 2e-3, "bf16": 2e-2, "fp32": 1e-6}[precision]
    np.testing.assert_allclose(found["scores"], want, rtol=0, atol=bound * np.abs(want).max())
