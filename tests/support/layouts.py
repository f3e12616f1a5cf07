"""LinearAttention nodes: their shapes, random inputs, reference results, and models of one node.

A ``Layout`` is everything of a node but its lengths and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from linexport.plugins.ops import feature_map
from linexport.plugins.ops.linear_attention import (
    INPUTS,
    SCALE,
    LinearAttentionSpec,
    linear_attention,
)
from linexport.plugins.ops.registry import attach_functions, register_schemas
from tests.support.runtimes import Arrays

register_schemas()

OUTPUTS = ("output", "present_state", "present_normalizer")
SEQUENCES = ("query", "key", "value", "decay", "beta")
"""Inputs in the dtype of the activations; states are float32 and the mask is bool."""

ELEMENT = {
    "float32": (np.float32, TensorProto.FLOAT),
    "float16": (np.float16, TensorProto.FLOAT16),
    "bfloat16": (ml_dtypes.bfloat16, TensorProto.BFLOAT16),
}


@dataclass(frozen=True)
class Layout:
    """One LinearAttention node up to its lengths and values."""

    spec: LinearAttentionSpec
    key_heads: int
    d_k: int = 3
    d_v: int = 5
    past: bool = False
    per_channel: bool = False
    factored: bool = False
    shared_beta: bool = False
    masked: bool = False
    dtype: str = "float32"

    def widths(self) -> dict[str, tuple[Any, ...]]:
        """Shapes of the inputs the node has, by name, with symbols for batch and length."""
        s, h = self.spec, self.spec.kv_num_heads
        sequence = {
            "query": s.q_num_heads * self.d_k,
            "key": self.key_heads * self.d_k,
            "value": h * self.d_v,
        }
        shapes: dict[str, tuple[Any, ...]] = {n: ("B", "T", w) for n, w in sequence.items()}
        if self.past:
            shapes["past_state"] = ("B", h, self.d_k, self.d_v)
        if self.past and s.normalize:
            shapes["past_normalizer"] = ("B", h, self.d_k)
        if s.has_decay:
            shapes["decay"] = ("B", "T", h * self.d_k if self.per_channel else h)
        if self.factored:
            shapes[SCALE] = (h, self.d_k)
        if s.has_beta:
            shapes["beta"] = ("B", "T", 1 if self.shared_beta else h)
        if self.masked:
            shapes["key_mask"] = ("B", "T")
        return shapes

    def inputs(self, rng: np.random.Generator, batch: int, length: int) -> Arrays:
        """Random values in the dtypes of the op; the delta rules get keys of norm 1."""
        sizes = {"B": batch, "T": length}
        arrays: Arrays = {}
        for name, shape in self.widths().items():
            x = rng.normal(size=[sizes.get(d, d) for d in shape])
            if name == "key" and self.spec.has_beta:
                heads = x.reshape(batch, length, self.key_heads, self.d_k)
                x = (heads / np.linalg.norm(heads, axis=-1, keepdims=True)).reshape(x.shape)
            if name in ("query", "key", "past_normalizer") and self.spec.normalize:
                x = np.abs(x) + 0.1
            if name == ("decay_scale" if self.factored else "decay"):
                x = -np.abs(x)
            elif name == "decay":
                x = np.abs(x)
            if name == "beta":
                x = rng.uniform(0, 2, x.shape)
            if name == "key_mask":
                arrays[name] = x > -0.5
            else:
                kind = self.dtype if name in SEQUENCES else "float32"
                arrays[name] = x.astype(ELEMENT[kind][0])
        return arrays

    def reference(self, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """The oracle on these inputs, in float64."""
        wide = {n: x if x.dtype == bool else x.astype(np.float64) for n, x in arrays.items()}
        with np.errstate(all="ignore"):
            return linear_attention(self.spec, **wide)

    def magnitude(self, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, ...]:
        """Sums of absolute values of the terms of each result: what rounding is relative to.

        In the delta rules the terms of a state are k_t beta_t (v_t - k_t . S_{t-1}), and the
        largest of their sums after any token stands in for every element: a token's error is
        read back by all later ones.
        """
        if not self.spec.has_beta:
            signed = ("decay", SCALE, "key_mask")
            terms = {n: x if n in signed else np.abs(x) for n, x in arrays.items()}
            return self.reference(terms)
        output, state, _ = self.reference(arrays)
        largest = self._largest_state(arrays)
        heads = (*output.shape[:2], self.spec.q_num_heads, self.d_k)
        query = np.abs(arrays["query"].astype(np.float64)).reshape(heads).sum(-1)
        query = np.repeat(query, output.shape[2] // self.spec.q_num_heads, axis=2)
        positive_keys = self.reference({**arrays, "key": np.abs(arrays["key"])})[2]
        return (
            np.maximum(np.abs(output), np.abs(self.spec.scale * largest * query)),
            np.full_like(state, largest),
            positive_keys,
        )

    def _largest_state(self, arrays: Mapping[str, np.ndarray]) -> float:
        """The largest sum of |terms| of a delta rule's state, after any token."""
        batch, length = arrays["query"].shape[:2]
        nothing = np.zeros((batch, self.spec.kv_num_heads, self.d_k, self.d_v))
        state = np.asarray(arrays.get("past_state", nothing), np.float64)
        sums = np.abs(state)
        largest = sums.max(initial=0)
        for t in range(length):
            token = {
                n: x if n == SCALE else x[:, t : t + 1]
                for n, x in arrays.items()
                if not n.startswith("past")
            }
            negative = {**token, "key": np.abs(token["key"]), "value": -np.abs(token["value"])}
            kept = {**token, "beta": np.zeros_like(token["beta"])}
            terms = self._state(kept, np.abs(state)) - self._state(negative, np.abs(state))
            sums = self._state(kept, sums) + terms
            state = self._state(token, state)
            largest = max(largest, sums.max(initial=0))
        return float(largest)

    def _state(self, token: Mapping[str, np.ndarray], past: np.ndarray) -> np.ndarray:
        return self.reference({**token, "past_state": past})[1]

    def model(self, **attach: Any) -> onnx.ModelProto:
        """The node with dynamic batch and length, its function attached.

        Graph inputs and outputs are float32 whatever the dtype of the node: Cast nodes stand
        between, as NumPy has no bfloat16 to feed a runtime with.
        """
        feeds, nodes, infos, names = [], [], [], []
        wide, narrow = TensorProto.FLOAT, ELEMENT[self.dtype][1]
        for name in (*INPUTS, *[""] * feature_map.PARAMETERS, SCALE):
            shape = self.widths().get(name)
            names.append(name if shape else "")
            if shape is None:
                continue
            kind = TensorProto.BOOL if name == "key_mask" else wide
            feeds.append(helper.make_tensor_value_info(name, kind, shape))
            if name in SEQUENCES and narrow != wide:
                names[-1] = f"{name}_cast"
                nodes.append(helper.make_node("Cast", [name], [names[-1]], to=narrow))
                infos.append(helper.make_tensor_value_info(names[-1], narrow, shape))
        while not names[-1]:
            names.pop()
        results = ["narrow_output", *OUTPUTS[1:]]
        nodes += [
            helper.make_node(
                "LinearAttention", names, results, domain="linexport", **self.spec.attributes()
            ),
            helper.make_node("Cast", results[:1], ["output"], to=wide),
        ]
        h, width = self.spec.kv_num_heads, self.spec.output_heads * self.d_v
        shapes = (("B", "T", width), ("B", h, self.d_k, self.d_v), ("B", h, self.d_k))
        ends = [
            helper.make_tensor_value_info(n, wide, s) for n, s in zip(OUTPUTS, shapes, strict=True)
        ]
        model = one_op_model(nodes, feeds, ends, infos)
        attach_functions(model, **attach)
        return model


def mapped_model(
    spec: LinearAttentionSpec,
    phi: Any,
    shapes: Mapping[str, Sequence[Any]],
    kind: int = TensorProto.FLOAT,
    **attach: Any,
) -> onnx.ModelProto:
    """One LinearAttention node that applies a map itself, its function attached.

    ``shapes`` are those of the inputs it is given; ``kind`` is the type of the activations.
    """
    types = dict.fromkeys(SEQUENCES, kind) | {"key_mask": TensorProto.BOOL, "output": kind}
    frozen = [
        numpy_helper.from_array(t.numpy(), n)
        for n, t in zip(feature_map.NAMES, phi.frozen(), strict=False)
    ]

    def typed(name: str, shape: Sequence[Any] | None) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, types.get(name, TensorProto.FLOAT), shape)

    node = helper.make_node(
        "LinearAttention",
        [*(n if n in shapes else "" for n in INPUTS), *(t.name for t in frozen)],
        OUTPUTS,
        domain="linexport",
        feature_map=phi.kind,
        **spec.attributes(),
    )
    given = [typed(n, s) for n, s in shapes.items()]
    model = one_op_model([node], given, [typed(n, None) for n in OUTPUTS])
    model.graph.initializer.extend(frozen)
    attach_functions(model, **attach)
    return model


def one_op_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    infos: Sequence[onnx.ValueInfoProto] = (),
) -> onnx.ModelProto:
    """A model at the opset the bodies are written in, without functions yet."""
    graph = helper.make_graph(list(nodes), "test", list(inputs), list(outputs), value_info=infos)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("linexport", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


HEADS = ((2, 2, 2), (4, 2, 2), (6, 2, 1), (2, 4, 4), (2, 4, 2), (1, 3, 1), (4, 1, 1), (1, 1, 1))
"""(query heads, key/value heads, key heads): groups on either side, fewer key heads."""


@st.composite
def layouts(draw: st.DrawFn, rule: str | None = None, dtype: str = "float32") -> Layout:
    """Any layout of the op, with small widths; ``rule`` fixes the update rule."""
    update = rule or draw(st.sampled_from(["linear", "gated", "delta", "gated_delta"]))
    query_heads, heads, key_heads = draw(st.sampled_from(HEADS))
    flags = {f: draw(st.booleans()) for f in ("past", "per_channel", "shared_beta", "masked")}
    causal = update != "linear" or draw(st.integers(0, 2)) > 0
    spec = LinearAttentionSpec(
        query_heads,
        heads,
        update,
        causal=causal,
        normalize="delta" not in update and draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 0.35, 2.5])),
        eps=draw(st.sampled_from([0.0, 1e-6, 0.5])),
        chunk_size=draw(st.sampled_from([1, 2, 7, 16, 33, 64])),
    )
    flags["past"] &= causal
    flags["factored"] = spec.has_decay and not flags["per_channel"] and draw(st.booleans())
    d_k, d_v = draw(st.sampled_from([(3, 5), (4, 2), (1, 3), (6, 6), (8, 1)]))
    return Layout(spec, key_heads, d_k, d_v, dtype=dtype, **flags)
