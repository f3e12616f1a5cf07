"""GatedDeltaNet token by token, random calls of it, and ONNX Runtime where it may lack a kernel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import strategies as st
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from linexport.plugins.ops.linear_attention.spec import UPDATE_RULES


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
