"""A small node of every op: its attributes and inputs, and the model that it alone makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper

from linexport.plugins.ops.op import Op
from linexport.plugins.ops.registry import attach_functions, register_schemas

RANDOM = np.random.default_rng(0)
BATCH, LENGTH, WIDTH = 7, 5, 8


def array(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


def per_token(*names: str) -> dict[str, np.ndarray]:
    return {name: array(BATCH, LENGTH, WIDTH) for name in names}


CASES: dict[str, tuple[dict[str, Any], dict[str, np.ndarray]]] = {
    "LinearAttention": (
        {"q_num_heads": 2, "kv_num_heads": 2, "update_rule": "gated"},
        {**per_token("query", "key", "value"), "decay": -np.abs(array(BATCH, LENGTH, 2))},
    ),
    "CausalConvWithState": (
        {"activation": "silu"},
        {"input": array(BATCH, WIDTH, LENGTH), "weight": array(WIDTH, 1, 4)},
    ),
    "CausalConvTokens": (
        {"activation": "silu"},
        {
            "input": array(BATCH, LENGTH, WIDTH),
            "weight": array(WIDTH, 1, 4),
            "past_state": array(BATCH, WIDTH, 3),
        },
    ),
    "CumulativeSum": (
        {"axis": 1, "exclusive": 0},
        {**per_token("input"), "past_state": array(BATCH, WIDTH)},
    ),
    "DiagonalStateSpace": (
        {},
        {
            "input": array(BATCH, LENGTH, WIDTH),
            "rate": -np.abs(array(2, 3)),
            "cosine": array(2, 3),
            "sine": array(2, 3),
            "angle": RANDOM.random((2, 3)),
        },
    ),
    "FeatureMap": ({"kind": "elu1", "num_heads": 2, "side": "key", "log": 0}, per_token("x")),
    "GeneralizedDeltaRule": (
        {"num_heads": 2, "scale": 0.5},
        {
            **per_token("query", "key", "value", "a", "b"),
            "decay": -np.abs(array(BATCH, LENGTH, WIDTH)),
        },
    ),
    "MixtureOfExperts": (
        {"activation": "gelu", "gated": 0},
        {
            "x": array(LENGTH, WIDTH),
            "index": np.array([[0, 2], [1, 0], [2, 1], [0, 1], [1, 2]]),
            "weight": array(LENGTH, 2),
            "up": array(3, 6, WIDTH),
            "down": array(3, 4, 6),
        },
    ),
    "StabilizedExp": (
        {"q_num_heads": 2, "k_num_heads": 2, "causal": 1},
        per_token("query", "key"),
    ),
    "WindowAttention": (
        {"q_num_heads": 4, "kv_num_heads": 2, "window": 3, "sinks": 1, "scale": 0.5},
        {
            "query": array(BATCH, LENGTH, 2 * WIDTH),
            **per_token("key"),
            "value": array(BATCH, LENGTH, 6),
            "past_key": array(BATCH, 3, WIDTH),
            "past_value": array(BATCH, 3, 6),
            "past_seen": np.float32(RANDOM.random((BATCH, 3)) < 0.7),
            "past_sink_key": np.zeros((BATCH, 1, WIDTH), np.float32),
            "past_sink_value": np.zeros((BATCH, 1, 6), np.float32),
            "past_left": np.zeros((BATCH, 1), np.float32),
        },
    ),
}
"""Attributes and inputs of a small node, by op."""


def model(op: Op, symbols: bool) -> onnx.ModelProto:
    """One node of the op without types of its outputs, its function attached."""
    register_schemas()
    attributes, inputs = CASES[op.name]
    names = [name if name in inputs else "" for name in op.input_names]
    outputs = [f"{name}_out" for name in op.output_names]
    node = helper.make_node(op.name, names, outputs, "node", domain="linexport", **attributes)
    sizes = {BATCH: "B", LENGTH: "T"} if symbols else {}
    typed = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(x.dtype), [sizes.get(d, d) for d in x.shape]
        )
        for name, x in inputs.items()
        if x.shape
    ]
    graph = helper.make_graph([node], "g", typed, [onnx.ValueInfoProto(name=n) for n in outputs])
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("linexport", 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    attach_functions(made)
    return made
