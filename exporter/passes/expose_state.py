"""Causal linexport nodes without a past -> the same nodes with past inputs and present outputs.

    LinearAttention(q, k, v)      becomes  past_state_i, past_normalizer_i -> present_...
    StabilizedExp(q, k)           becomes  past_key_max_i -> present_key_max_i
    CausalConvWithState(x, w)     becomes  past_conv_i -> present_conv_i

so that one graph serves prefill (the initial past, any T) and decode (T = 1). Whether the model as
a whole streams by these states is for validation to decide, not for this pass.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from linexport.plugins.ops.op import DOMAIN

STAGE = "state"

# Per op: formal position of the past input, position of the present output, name of the pair.
LINEAR_ATTENTION = ((3, 1, "state"), (4, 2, "normalizer"))
KEY_MAX = ((2, 3, "key_max"),)
CONV = ((3, 1, "conv"),)
SIDES = ("past", "present")


def run(graph: gs.Graph) -> None:
    """Apply to every causal node; pasts that the graph already provides are left alone."""
    index, taken = 0, set(graph.tensors())
    for node in list(graph.nodes):
        if node.domain != DOMAIN:
            continue
        if node.op == "LinearAttention" and node.attrs.get("causal", 1):
            pairs = LINEAR_ATTENTION if node.attrs.get("normalize", 0) else LINEAR_ATTENTION[:1]
        elif node.op == "StabilizedExp" and node.attrs.get("causal", 1):
            pairs = KEY_MAX
        elif node.op == "CausalConvWithState":
            pairs = CONV
        else:
            continue
        if any(_given(node, past) for past, _, _ in pairs):
            continue
        while any(f"{side}_{pair[2]}_{index}" in taken for pair in pairs for side in SIDES):
            index += 1
        for past, present, name in pairs:
            shape, dtype = _state_type(node, name)
            _attach(graph, node, past, present, f"{name}_{index}", shape, dtype)
        index += 1


def _given(node: gs.Node, position: int) -> bool:
    return len(node.inputs) > position and not node.inputs[position].is_empty()


def _state_type(node: gs.Node, name: str) -> tuple[list[int | str], type]:
    batch = node.inputs[0].shape[0]
    if name == "conv":
        channels, _, size = node.inputs[1].shape
        return [batch, channels, size - 1], node.inputs[0].dtype
    if name == "key_max":
        heads = node.attrs["k_num_heads"]
        return [batch, heads, node.inputs[1].shape[2] // heads], np.float32
    heads = node.attrs["kv_num_heads"]
    d_k = node.inputs[0].shape[2] // node.attrs["q_num_heads"]
    d_v = node.inputs[2].shape[2] // heads
    return [batch, heads, d_k, *([d_v] if name == "state" else [])], np.float32


def _attach(
    graph: gs.Graph,
    node: gs.Node,
    past: int,
    present: int,
    name: str,
    shape: list[int | str],
    dtype: type,
) -> None:
    while len(node.inputs) <= past:
        node.inputs.append(gs.Variable.empty())
    node.inputs[past] = gs.Variable(f"past_{name}", dtype=dtype, shape=shape)
    graph.inputs.append(node.inputs[past])
    while len(node.outputs) <= present:
        node.outputs.append(gs.Variable.empty())
    output, state = node.outputs[present], gs.Variable(f"present_{name}", dtype, shape)
    node.outputs[present] = state
    graph.outputs.append(state)
    if not output.is_empty() and (output in graph.outputs or output.outputs):
        # The model's own use of it stays what it is.
        copy = gs.Node("Identity", f"{node.name}/{state.name}", inputs=[state], outputs=[output])
        graph.nodes.append(copy)
