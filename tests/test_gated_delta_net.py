"""GatedDeltaNet as it is defined, beside a recurrence in float64 that shares no code with it.

What is written fits the schema, whose shapes are inferred. On the CPU, what stands for it gives
what the schema says, and so does the kernel, which ONNX Runtime has there from 1.32 on.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from linexport.plugins.ops.body import MICROSOFT, Body
from linexport.plugins.ops.linear_attention.spec import UPDATE_RULES, LinearAttentionSpec
from linexport.targets import gated_delta_net


def recurrence(
    given: dict[str, np.ndarray], rule: str, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs (B, T, H, d_v) and last states (B, H, d_k, d_v), token by token.

    Heads are split: q, k (B, T, G, d_k), v (B, T, H, d_v), S (B, H, d_k, d_v), g (B, T, H, d_k or
    1), beta (B, T, H).
    """
    x = {name: values.astype(np.float64) for name, values in given.items()}
    served = x["v"].shape[2] // x["q"].shape[2]
    q, k = (np.repeat(x[name], served, axis=2) for name in "qk")
    S, outputs = x["S"].copy(), []
    for t in range(q.shape[1]):
        if "gated" in rule:
            S = S * np.exp(x["g"][:, t])[..., None]
        v = x["v"][:, t]
        if "delta" in rule:
            v = x["beta"][:, t, :, None] * (v - np.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + np.einsum("bhk,bhv->bhkv", k[:, t], v)
        outputs.append(scale * np.einsum("bhkv,bhk->bhv", S, q[:, t]))
    return np.stack(outputs, 1), S


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, float, bool, bool, dict[str, np.ndarray]]:
    """A rule, a scale, whether there is a past and a beta of each head, and split inputs."""
    rule = draw(st.sampled_from(UPDATE_RULES))
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    shared, served = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    d_k, d_v = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    past, per_head = draw(st.booleans()), draw(st.booleans())
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    heads = shared * served
    k = random.normal(size=(batch, length, shared, d_k))
    k /= np.linalg.norm(k, axis=-1, keepdims=True) + 1e-6
    beta = random.random((batch, length, heads if per_head else 1))
    split = {
        "q": random.normal(size=(batch, length, shared, d_k)),
        "k": k,
        "v": random.normal(size=(batch, length, heads, d_v)),
        "S": past * random.normal(size=(batch, heads, d_k, d_v)),
        "g": -random.exponential(size=(batch, length, heads, draw(st.sampled_from((1, d_k))))),
        "beta": np.broadcast_to(beta, (batch, length, heads)),
    }
    scale = draw(st.floats(0.125, 2.0, width=32))
    return rule, scale, past, per_head, {n: x.astype(np.float32) for n, x in split.items()}


def written(
    rule: str, scale: float, past: bool, per_head: bool, split: dict[str, np.ndarray]
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A model of one call, and what it is fed: packed heads."""
    (batch, length, shared, _), heads = split["q"].shape, split["v"].shape[2]
    fed = {n: split[n].reshape(batch, length, -1) for n in ("q", "k", "v", "g", "beta")}
    fed["S"] = split["S"]
    fed["beta"] = fed["beta"] if per_head else fed["beta"][..., :1]
    unread = {"g": "gated" not in rule, "beta": "delta" not in rule, "S": not past}
    fed = {n: x for n, x in fed.items() if not unread.get(n, False)}
    spec = LinearAttentionSpec(shared, heads, update_rule=rule, scale=scale)
    names = ("q", "k", "v", "S", "g", "beta")
    widths = {n: (1, 1, x.shape[-1]) for n, x in fed.items() if n != "S"}
    sizes = spec.check(*(widths[n] for n in "qkv"), decay=widths.get("g"), beta=widths.get("beta"))
    b = Body()
    outputs = gated_delta_net.call(b, spec, sizes, tuple(n if n in fed else "" for n in names))
    typed = [
        helper.make_tensor_value_info(
            n, TensorProto.FLOAT, ["B", *x.shape[1:]] if n == "S" else ["B", "T", x.shape[-1]]
        )
        for n, x in fed.items()
    ]
    graph = helper.make_graph(
        b.nodes, "call", typed, [helper.make_empty_tensor_value_info(o) for o in outputs]
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), fed


def has_kernel(op: str) -> bool:
    """Whether the installed ONNX Runtime runs an operator of its own on the CPU."""
    kernels = ort_state.get_all_opkernel_def()
    return any((k.op_name, k.provider) == (op, "CPUExecutionProvider") for k in kernels)


def opened(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )


def opens(op: str) -> AbstractContextManager[Any]:
    """Types and shapes are checked before kernels are looked for."""
    return nullcontext() if has_kernel(op) else pytest.raises(ort_state.NotImplemented, match=op)


@given(calls())
@settings(max_examples=80, deadline=None)
def test_on_the_cpu_it_gives_what_the_recurrence_does(
    drawn: tuple[str, float, bool, bool, dict[str, np.ndarray]],
) -> None:
    rule, scale, past, per_head, split = drawn
    model, fed = written(rule, scale, past, per_head, split)
    expected, last = recurrence(split, rule, scale)
    by_kernel = [model] if has_kernel(gated_delta_net.OP) else []
    for runs in (gated_delta_net.defined(model), *by_kernel):
        output, state = opened(runs).run(None, fed)
        for got, right in ((output, expected.reshape(output.shape)), (state, last)):
            assert got.shape == right.shape
            assert np.abs(got - right).max() <= 2e-5 * max(1.0, np.abs(right).max())


@given(calls())
@settings(max_examples=20, deadline=None)
def test_what_is_written_fits_the_schema(
    drawn: tuple[str, float, bool, bool, dict[str, np.ndarray]],
) -> None:
    model, _ = written(*drawn)
    with opens(gated_delta_net.OP):
        opened(model)
    schema = next(
        s
        for s in ort_state.get_all_operator_schema()
        if (s.domain, s.name) == (MICROSOFT, gated_delta_net.OP)
    )
    assert tuple(i.name for i in schema.inputs)[: len(gated_delta_net.INPUTS)] == (
        gated_delta_net.INPUTS
    )
    node = next(n for n in model.graph.node if n.op_type == gated_delta_net.OP)
    assert {a.name for a in node.attribute} <= set(schema.attributes)


def test_a_model_without_it_is_left_as_it_is() -> None:
    node = helper.make_node("Identity", ["x"], ["y"])
    model = helper.make_model(helper.make_graph([node], "g", [], []))
    assert gated_delta_net.defined(model) is model


def test_packed_batches_are_in_the_schemas(capfd: pytest.CaptureFixture[str]) -> None:
    """Sequences of their own lengths, 7 tokens in all; no artifact has them (docs/targets.md).

    ONNX Runtime names the shapes that it infers where others are declared.
    """
    shapes = {"q": (7, 2, 8), "v": (7, 4, 6), "g": (7, 4), "S": (2, 4, 6, 8), "ends": (3,)}
    shapes |= {"x": (7, 5), "w": (5, 1, 4), "past": (2, 5, 3), "output": (0,), "state": (0,)}
    typed = {
        name: helper.make_tensor_value_info(
            name, TensorProto.INT32 if name == "ends" else TensorProto.FLOAT, shape
        )
        for name, shape in shapes.items()
    }
    delta = (gated_delta_net.OP, ("q", "q", "v", "ends", "g", "g", "S"), "7,4,6", "2,4,6,8")
    convolution = ("VarlenCausalConvWithState", ("x", "w", "ends", "", "past"), "7,5", "2,5,3")
    for name, inputs, *inferred in (delta, convolution):
        node = helper.make_node(name, inputs, ["output", "state"], domain=MICROSOFT)
        read = [typed[x] for x in dict.fromkeys(inputs) if x]
        graph = helper.make_graph([node], "packed", read, [typed["output"], typed["state"]])
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid(MICROSOFT, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        with opens(name):
            opened(model)
        said = capfd.readouterr().err
        assert all(f"source:{{{shape}}}" in said for shape in inferred), said
