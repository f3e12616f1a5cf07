"""Recurrences in Scan, ONNX's own operator, and attention in the bodies of loops."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper, shape_inference

from linexport import passes
from linexport.plugins.ops.linear_attention import LinearAttentionSpec, linear_attention
from linexport.plugins.ops.registry import attach_functions

HEADS, D = 2, 4
GAMMA = 0.9


def value(name: str, shape: list[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def constants(**arrays: object) -> list[onnx.TensorProto]:
    return [numpy_helper.from_array(np.asarray(a), n) for n, a in arrays.items()]


def recurrence(decay: str, start: float = 0.0) -> onnx.ModelProto:
    """S = a S + k v^T, z = a z + k, o = q S / (q z + eps) as a Scan over (T, B, H, d)."""
    states = {"S_in": ["B", HEADS, D, D], "z_in": ["B", HEADS, D]}
    steps = {f"{n}_t": ["B", HEADS, D] for n in "qkv"}
    nodes = [
        helper.make_node("Unsqueeze", ["k_t", "last"], ["k_column"]),
        helper.make_node("Unsqueeze", ["v_t", "before"], ["v_row"]),
        helper.make_node("Mul", ["k_column", "v_row"], ["kv"]),
    ]
    S, z = "S_in", "z_in"
    if decay != "none":
        rate = ("gamma", "gamma")
        if decay == "gate":
            steps["a_t"] = ["B", HEADS]
            nodes.append(helper.make_node("Unsqueeze", ["a_t", "last"], ["a_1"]))
            nodes.append(helper.make_node("Unsqueeze", ["a_1", "last"], ["a_2"]))
            rate = ("a_2", "a_1")
        nodes.append(helper.make_node("Mul", ["S_in", rate[0]], ["S_kept"]))
        nodes.append(helper.make_node("Mul", ["z_in", rate[1]], ["z_kept"]))
        S, z = "S_kept", "z_kept"
    nodes += [
        helper.make_node("Add", [S, "kv"], ["S_out"]),
        helper.make_node("Add", [z, "k_t"], ["z_out"]),
        helper.make_node("Unsqueeze", ["q_t", "before"], ["q_row"]),
        helper.make_node("MatMul", ["q_row", "S_out"], ["read"]),
        helper.make_node("Squeeze", ["read", "before"], ["top"]),
        helper.make_node("Mul", ["q_t", "z_out"], ["qz"]),
        helper.make_node("ReduceSum", ["qz", "last"], ["below"]),
        helper.make_node("Add", ["below", "eps"], ["safe"]),
        helper.make_node("Div", ["top", "safe"], ["o"]),
    ]
    body = helper.make_graph(
        nodes,
        "step",
        [value(n, s) for n, s in {**states, **steps}.items()],
        [value("S_out", states["S_in"]), value("z_out", states["z_in"]), value("o", steps["q_t"])],
        constants(last=[-1], before=[-2], eps=np.float32(1e-6), gamma=np.float32(GAMMA)),
    )
    inputs = {n: ["B", "T", HEADS, D] for n in "qkv"}
    outer = [helper.make_node("Transpose", [n], [f"{n}s"], perm=[1, 0, 2, 3]) for n in "qkv"]
    scanned = ["qs", "ks", "vs"]
    if decay == "gate":
        inputs["a"] = ["B", "T", HEADS]
        outer.append(helper.make_node("Sigmoid", ["a"], ["rate"]))
        outer.append(helper.make_node("Transpose", ["rate"], ["rates"], perm=[1, 0, 2]))
        scanned.append("rates")
    fill = numpy_helper.from_array(np.asarray([start], np.float32))
    outer += [
        helper.make_node("Shape", ["q"], ["batch"], start=0, end=1),
        helper.make_node("Concat", ["batch", "hdd"], ["S_shape"], axis=0),
        helper.make_node("Concat", ["batch", "hd"], ["z_shape"], axis=0),
        helper.make_node("ConstantOfShape", ["S_shape"], ["S_0"], value=fill),
        helper.make_node("ConstantOfShape", ["z_shape"], ["z_0"], value=fill),
        helper.make_node(
            "Scan",
            ["S_0", "z_0", *scanned],
            ["S_T", "z_T", "stacked"],
            name="loop",
            body=body,
            num_scan_inputs=len(scanned),
        ),
        helper.make_node("Transpose", ["stacked"], ["out"], perm=[1, 0, 2, 3]),
    ]
    return built(outer, inputs, constants(hdd=[HEADS, D, D], hd=[HEADS, D]))


def built(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, list[int | str]],
    stored: list[onnx.TensorProto],
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "test",
        [value(n, s) for n, s in inputs.items()],
        [value("out", ["B", "T", HEADS, D])],
        stored,
    )
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    return shape_inference.infer_shapes(model)


def run(model: onnx.ModelProto, fed: dict[str, np.ndarray]) -> np.ndarray:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    attach_functions(copy)
    session = onnxruntime.InferenceSession(
        copy.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(["out"], fed)[0])


def draw(names: str, length: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(length)
    shapes = {n: (2, length, HEADS) if n == "a" else (2, length, HEADS, D) for n in names}
    return {n: np.abs(random.standard_normal(s)).astype(np.float32) for n, s in shapes.items()}


@pytest.mark.parametrize(
    ("decay", "rule"), [("none", "linear"), ("constant", "gated"), ("gate", "gated")]
)
def test_a_scan_is_read_in_closed_form(decay: str, rule: str) -> None:
    rewritten = passes.rewrite(recurrence(decay), ("fuse",))
    (match,) = rewritten.findings.matches
    assert (match.update_rule, match.causal, match.normalize) == (rule, True, True)
    assert match.eps == pytest.approx(1e-6)
    assert "Scan" not in {n.op_type for n in rewritten.model.graph.node}
    fed = draw("qkva" if decay == "gate" else "qkv", 23)
    packed = [fed[n].reshape(2, 23, HEADS * D).astype(np.float64) for n in "qkv"]
    gates = {
        "none": None,
        "constant": np.full((2, 23, HEADS), np.log(GAMMA)),
        "gate": -np.log1p(np.exp(-fed["a"].astype(np.float64))) if decay == "gate" else None,
    }
    spec = LinearAttentionSpec(HEADS, HEADS, rule, normalize=True, eps=1e-6)
    expected, _, _ = linear_attention(spec, *packed, decay=gates[decay])
    got = run(rewritten.model, fed).reshape(2, 23, HEADS * D)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_a_scan_that_starts_elsewhere_is_left_alone() -> None:
    rewritten = passes.rewrite(recurrence("none", start=0.5), ("fuse",))
    assert not rewritten.findings.matches
    assert "Scan" in {n.op_type for n in rewritten.model.graph.node}


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
@pytest.mark.parametrize("scale", [0.0, 0.25])
def test_the_operator_of_onnx_becomes_ours(domain: str, scale: float) -> None:
    """Its zero scale is 1 / sqrt(d_k)."""
    node = helper.make_node(
        "LinearAttention",
        ["q", "k", "v", "", "g"],
        ["packed", "state"],
        domain=domain,
        q_num_heads=HEADS,
        kv_num_heads=HEADS,
        update_rule="gated",
        scale=scale,
    )
    split = helper.make_node("Reshape", ["packed", "split"], ["out"])
    inputs: dict[str, list[int | str]] = {n: ["B", "T", HEADS * D] for n in "qkv"}
    inputs["g"] = ["B", "T", HEADS]
    model = built([node, split], inputs, constants(split=[0, 0, HEADS, D]))
    rewritten = passes.run(model, ("canonicalise",))
    assert "linexport" in {n.domain for n in rewritten.graph.node if n.op_type == "LinearAttention"}
    random = np.random.default_rng(0)
    fed = {n: random.standard_normal((2, 9, HEADS * D)).astype(np.float32) for n in "qkv"}
    fed["g"] = -np.abs(random.standard_normal((2, 9, HEADS))).astype(np.float32)
    spec = LinearAttentionSpec(HEADS, HEADS, "gated", scale=scale or D**-0.5)
    wide = {n: x.astype(np.float64) for n, x in fed.items()}
    expected, _, _ = linear_attention(spec, wide["q"], wide["k"], wide["v"], decay=wide["g"])
    got = run(rewritten, fed).reshape(2, 9, HEADS * D)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def body(inputs: list[onnx.ValueInfoProto], keeps_going: bool = False) -> onnx.GraphProto:
    """Attention of q, k and v, which come from around it."""
    condition = [helper.make_node("Identity", ["going"], ["goes_on"])] if keeps_going else []
    also = [helper.make_tensor_value_info("goes_on", TensorProto.BOOL, [])] if keeps_going else []
    return helper.make_graph(
        [
            *condition,
            helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 3, 1]),
            helper.make_node("Transpose", ["q"], ["qt"], perm=[0, 2, 1, 3]),
            helper.make_node("Transpose", ["v"], ["vt"], perm=[0, 2, 1, 3]),
            helper.make_node("MatMul", ["qt", "kt"], ["scores"]),
            helper.make_node("Trilu", ["scores"], ["kept"], upper=0),
            helper.make_node("MatMul", ["kept", "vt"], ["read"]),
            helper.make_node("Transpose", ["read"], ["attended"], perm=[0, 2, 1, 3]),
        ],
        "attend",
        inputs,
        [*also, value("attended", ["B", "T", HEADS, D])],
    )


def branch() -> list[onnx.NodeProto]:
    other = helper.make_graph(
        [helper.make_node("Identity", ["v"], ["same"])],
        "pass",
        [],
        [value("same", ["B", "T", HEADS, D])],
    )
    branches = {"then_branch": body([]), "else_branch": other}
    return [
        helper.make_node("ReduceSum", ["q"], ["total"], keepdims=0),
        helper.make_node("Greater", ["total", "zero"], ["condition"]),
        helper.make_node("If", ["condition"], ["out"], name="here", **branches),
    ]


def loop() -> list[onnx.NodeProto]:
    inputs = [
        helper.make_tensor_value_info("step", TensorProto.INT64, []),
        helper.make_tensor_value_info("going", TensorProto.BOOL, []),
    ]
    around = body(inputs, keeps_going=True)
    return [helper.make_node("Loop", ["count", "true"], ["out"], name="here", body=around)]


def scan() -> list[onnx.NodeProto]:
    around = body([value("step", [])])
    return [
        helper.make_node("Scan", ["steps"], ["out"], name="here", body=around, num_scan_inputs=1)
    ]


@pytest.mark.parametrize("written", [branch, loop, scan])
def test_attention_in_a_body_is_named_and_left_alone(
    written: Callable[[], list[onnx.NodeProto]],
) -> None:
    """Ops of linexport are put into the main graph only."""
    inputs: dict[str, list[int | str]] = {n: ["B", "T", HEADS, D] for n in "qkv"}
    given = {"zero": np.float32(0), "count": np.int64(2), "true": np.bool_(True)}
    model = built(written(), inputs, constants(**given, steps=np.zeros(2, np.float32)))
    rewritten = passes.rewrite(model, ("fuse",))
    assert not rewritten.findings.matches
    (miss,) = rewritten.findings.unmatched
    assert miss.nodes == ("here",) and "main graph" in miss.reason
