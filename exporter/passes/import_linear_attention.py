"""LinearAttention of ONNX opset 27 or of ONNX Runtime -> the op of this domain.

    (query, key, value, past_state?, decay?, beta?)      becomes
    (query, key, value, past_state?, -, decay?, beta?)   in the domain linexport

The update rules are the same; a scale of 0, or none, is 1 / sqrt(d_k). A node whose state is not
float32 or whose query width is not known stays as it is.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_graphsurgeon as gs

from linexport.plugins.ops.op import DOMAIN

STAGE = "canonicalise"

DOMAINS = (None, "", "ai.onnx", "com.microsoft")

ATTRIBUTES = ("q_num_heads", "kv_num_heads", "update_rule")


def run(graph: gs.Graph) -> None:
    """Apply to every node of the operator."""
    for node in graph.nodes:
        if node.op != "LinearAttention" or node.domain not in DOMAINS:
            continue
        width = node.inputs[0].shape[-1] if node.inputs[0].shape else None
        heads = node.attrs.get("q_num_heads")
        present = [t for t in node.outputs[1:2] if t.outputs or t in graph.outputs]
        states = [t for t in (*node.inputs[3:4], *present) if not t.is_empty()]
        if not isinstance(width, int) or not heads or any(not _single(t) for t in states):
            continue
        scale = float(node.attrs.get("scale", 0.0)) or 1 / math.sqrt(width // heads)
        kept = {k: v for k, v in node.attrs.items() if k in ATTRIBUTES}
        node.attrs = {"update_rule": "gated_delta", **kept, "causal": 1, "scale": scale}
        if len(node.inputs) > 4:
            node.inputs.insert(4, gs.Variable.empty())
        node.domain = DOMAIN


def _single(state: gs.Tensor) -> bool:
    return state.dtype is not None and np.dtype(state.dtype) == np.float32
