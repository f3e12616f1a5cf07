"""LinearAttention of ONNX opset 27 or of ONNX Runtime -> the op of this domain.

    (query, key, value, past_state?, decay?, beta?)      becomes
    (query, key, value, past_state?, -, decay?, beta?)   in the domain linexport

The update rules are the same; a scale of 0, or none, is 1 / sqrt(d_k). A node whose state is not
float32 or whose query width is not known is not changed.
"""

from __future__ import annotations

import logging
import math

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.contract import NoMatchError, Pass, PassResult, rewrite_matches
from linexport.graph.edit import is_output
from linexport.plugins.ops.op import DOMAIN

log = logging.getLogger(__name__)

DOMAINS = (None, "", "ai.onnx", "com.microsoft")

ATTRIBUTES = ("q_num_heads", "kv_num_heads", "update_rule")


def run(graph: gs.Graph) -> PassResult:
    """Import every node of the operator."""
    return rewrite_matches(graph, _scale, _import, log)


def _scale(graph: gs.Graph, node: gs.Node) -> float | None:
    """Return the factor of the query of a node that can be imported."""
    if node.op != "LinearAttention" or node.domain not in DOMAINS:
        return None
    width = node.inputs[0].shape[-1] if node.inputs[0].shape else None
    heads = node.attrs.get("q_num_heads")
    if not isinstance(width, int) or not heads:
        raise NoMatchError(f"its query is {width} wide, in {heads} heads: both must be known")
    present = [t for t in node.outputs[1:2] if t.outputs or is_output(graph, t)]
    states = [t for t in (*node.inputs[3:4], *present) if not t.is_empty()]
    if not all(_is_float32(state) for state in states):
        raise NoMatchError("its state is not float32")
    return float(node.attrs.get("scale", 0.0)) or 1 / math.sqrt(width // heads)


def _import(graph: gs.Graph, node: gs.Node, scale: float) -> None:
    kept = {k: v for k, v in node.attrs.items() if k in ATTRIBUTES}
    node.attrs = {"update_rule": "gated_delta", **kept, "causal": 1, "scale": scale}
    if len(node.inputs) > 4:
        node.inputs.insert(4, gs.Variable.empty())  # the normaliser, which ONNX does not have
    node.domain = DOMAIN


def _is_float32(state: gs.Tensor) -> bool:
    return state.dtype is not None and np.dtype(state.dtype) == np.float32


PASS = Pass(
    name="import_linear_attention",
    stage="canonicalise",
    ensures="LinearAttention of other domains has an unknown width or a half-precision state",
    run=run,
)
