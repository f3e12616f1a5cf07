"""The op ``linexport.WindowAttention``: softmax over the last w tokens, and those that leave them.

    s_tj    = scale q_t . k_j                     j the last w tokens, t among them, and the sinks
    maximum = max_j s_tj                          total = sum_j exp(s_tj - maximum)
    output  = sum_j exp(s_tj - maximum) v_j / total
    left_t  = token t - w, which leaves the window at token t

log(total) + maximum is the logarithm of the sum of exp(s_tj), by which a part for older keys joins
under one denominator: linear attention over the tokens that left takes left_key, left_value and, as
its key mask, left_mask. A key is in one of both parts at every token.

The state is a ring of w rows: keys, values, and 1 for rows of a token. With ``sinks`` s > 0 the
first s tokens that leave remain visible: they are rows of their own, and left_mask is False for
them. past_left counts them. A token that key_mask hides is seen by none and never leaves. Where a
query sees no key, output and total are 0 and maximum is LOWEST.

Query heads share keys and values in consecutive groups, as in LinearAttention.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import defs, helper

from linexport.plugins.ops.op import (
    DOMAIN,
    VERSION,
    Attributes,
    Inputs,
    Node,
    Op,
    StatePort,
    activations,
    parameter,
)
from linexport.plugins.ops.shapes import PartialShape
from linexport.plugins.ops.window_attention.definition import (
    Array,
    WindowSpec,
    eager,
    window_attention,
)
from linexport.plugins.ops.window_attention.portable import portable

__all__ = ["OP", "WindowSpec", "window_attention"]


def _oracle(attributes: Attributes, inputs: Inputs) -> tuple[Array, ...]:
    return window_attention(WindowSpec.from_attributes(attributes), **inputs)


def _infer(node: Node) -> Sequence[PartialShape]:
    spec = WindowSpec.from_attributes(node.attributes)
    d_v = spec.check(**node.shapes)[1]
    batch, length, _ = node.shapes["query"]
    keys, values = (node.shapes[name][2] for name in ("key", "value"))
    heads = (batch, length, spec.q_num_heads)
    return [
        (batch, length, spec.q_num_heads * d_v),
        heads,
        heads,
        (batch, length, keys),
        (batch, length, values),
        (batch, length),
        (batch, spec.window, keys),
        (batch, spec.window, values),
        (batch, spec.window),
        (batch, spec.sinks, keys),
        (batch, spec.sinks, values),
        (batch, 1),
    ]


def _states(node: Node) -> list[StatePort]:
    spec = WindowSpec.from_attributes(node.attributes)
    spec.check(**node.shapes)
    keys, values = (node.shapes[name][2] for name in ("key", "value"))
    assert isinstance(keys, int)
    assert isinstance(values, int)
    found = [
        StatePort(3, 6, "window_key", (spec.window, keys)),
        StatePort(4, 7, "window_value", (spec.window, values)),
        StatePort(5, 8, "window_seen", (spec.window,)),
    ]
    if spec.sinks:
        found += [
            StatePort(6, 9, "sink_key", (spec.sinks, keys)),
            StatePort(7, 10, "sink_value", (spec.sinks, values)),
            StatePort(8, 11, "left", (1,)),
        ]
    return found


def _sizes(node: Node) -> dict[str, int]:
    d_k, d_v = WindowSpec.from_attributes(node.attributes).check(**node.shapes)
    return {"d_k": d_k, "d_v": d_v}


def _describe(node: Node) -> str:
    spec = WindowSpec.from_attributes(node.attributes)
    sinks = f" and {spec.sinks} sinks" if spec.sinks else ""
    heads = f"{spec.q_num_heads} query, {spec.kv_num_heads} key heads"
    return f"the last {spec.window} tokens{sinks}, {heads}"


_ROWS = "(B, w, H_k * d), (B, w, H_k * d_v) and (B, w), 1 for rows of a token"

OP = Op(
    schema=defs.OpSchema(
        "WindowAttention",
        DOMAIN,
        VERSION,
        doc=__doc__ or "",
        inputs=[
            parameter("query", "T", "(B, T, H * d)"),
            parameter("key", "T", "(B, T, H_k * d)"),
            parameter("value", "T", "(B, T, H_k * d_v)"),
            parameter("past_key", "T", _ROWS, "Optional"),
            parameter("past_value", "T", _ROWS, "Optional"),
            parameter("past_seen", "S", _ROWS, "Optional"),
            parameter("past_sink_key", "T", "(B, s, H_k * d)", "Optional"),
            parameter("past_sink_value", "T", "(B, s, H_k * d_v)", "Optional"),
            parameter("past_left", "S", "(B, 1), tokens that left, at most s", "Optional"),
            parameter("key_mask", "tensor(bool)", "(B, T), False: padded token", "Optional"),
        ],
        outputs=[
            parameter("output", "T", "(B, T, H * d_v)"),
            parameter("maximum", "S", "(B, T, H)", "Optional"),
            parameter("total", "S", "(B, T, H)", "Optional"),
            parameter("left_key", "T", "(B, T, H_k * d)", "Optional"),
            parameter("left_value", "T", "(B, T, H_k * d_v)", "Optional"),
            parameter("left_mask", "tensor(bool)", "(B, T)", "Optional"),
            parameter("present_key", "T", _ROWS, "Optional"),
            parameter("present_value", "T", _ROWS, "Optional"),
            parameter("present_seen", "S", _ROWS, "Optional"),
            parameter("present_sink_key", "T", "(B, s, H_k * d)", "Optional"),
            parameter("present_sink_value", "T", "(B, s, H_k * d_v)", "Optional"),
            parameter("present_left", "S", "(B, 1)", "Optional"),
        ],
        type_constraints=activations("T", "S"),
        attributes=[
            defs.OpSchema.Attribute("q_num_heads", defs.OpSchema.AttrType.INT, "H."),
            defs.OpSchema.Attribute("kv_num_heads", defs.OpSchema.AttrType.INT, "H_k."),
            defs.OpSchema.Attribute("window", defs.OpSchema.AttrType.INT, "w."),
            defs.OpSchema.Attribute("sinks", helper.make_attribute("sinks", 0)),
            defs.OpSchema.Attribute("scale", helper.make_attribute("scale", np.float32(1.0))),
        ],
    ),
    infer=_infer,
    portable=portable,
    torch_schema="""window_attention(
        Tensor query, Tensor key, Tensor value, Tensor? past_key, Tensor? past_value,
        Tensor? past_seen, Tensor? past_sink_key, Tensor? past_sink_value, Tensor? past_left,
        Tensor? key_mask, int q_num_heads, int kv_num_heads, int window, int sinks, float scale
    ) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
          Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)""",
    eager=eager,
    oracle=_oracle,
    token_axis=dict.fromkeys(
        (
            *("query", "key", "value", "key_mask", "output", "maximum", "total"),
            *("left_key", "left_value", "left_mask"),
        ),
        1,
    ),
    states=_states,
    sizes=_sizes,
    describe=_describe,
    summary="Exact softmax attention to the last tokens, for a sum with linear attention.",
)
