"""ONNX Runtime's VarlenCausalConvWithState: a causal convolution of sequences side by side.

    VarlenCausalConvWithState(x (n, C), weight (C, 1, k), cu_seqlens (B + 1), bias (C),
                              past (B, C, k - 1))  ->  y (n, C), present (B, C, k - 1)

    y_t = f(bias + sum_j weight_j x_{t - (k-1) + j})   within each sequence, after its past
    f   = identity, or silu(y) = y * sigmoid(y)

Every sequence has a token, and the past is required. ONNX Runtime has kernels for CUDA, and for the
CPU from 1.32 on; without, ``definition`` is run.

Source: the schema of ``com.microsoft.VarlenCausalConvWithState`` in ONNX Runtime 1.31.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto

from linexport.plugins.ops import causal_conv
from linexport.plugins.ops.body import MICROSOFT, Body
from linexport.plugins.ops.op import Node, attribute_value
from linexport.targets.lowering.ragged_rows import SequenceRows

OP = "VarlenCausalConvWithState"

INPUTS = ("input", "weight", "cumulative_sequence_length", "bias", "initial_state")
OUTPUTS = ("output", "final_state")


def lowering(node: Node, ends: str) -> tuple[Body, list[str]]:
    """Write the operator, in float32, for a CausalConvTokens.

    Args:
        node: its input is (1, n, C), and it has a past.
        ends: cu_seqlens.
    """
    b = Body()
    x, weight, bias, past = (x and b.Cast(x, to=TensorProto.FLOAT) for x in node.inputs)
    output, state = b.node(
        OP,
        *(b.Squeeze(x, b.const([0])), weight, ends, bias, past),
        outputs=2,
        domain=MICROSOFT,
        activation=causal_conv.activation_of(node),
    )
    return b, [b.CastLike(b.Unsqueeze(output, b.const([0])), node.inputs[0]), state]


def definition(domain: str, name: str, node: onnx.NodeProto) -> onnx.FunctionProto:
    """Return what a node that ``lowering`` writes computes, in standard operators."""
    settings = {a.name: attribute_value(a) for a in node.attribute}
    b = Body()
    x, weight, ends, bias, past = INPUTS
    rows = SequenceRows.of(b, ends, x)
    channels_last = [0, 2, 1]
    turned = b.Transpose(rows.padded(x), perm=channels_last)
    seen = b.Concat(past, turned, axis=2)
    taps = b.Range(b.const(0), b.Squeeze(b.Shape(weight, start=2)), b.const(1))
    length = b.Squeeze(b.Shape(turned, start=2))
    column = b.const([1])
    places = b.Unsqueeze(b.Range(b.const(0), length, b.const(1)), column)
    windows = b.Gather(seen, b.Add(places, taps), axis=2)  # (B, C, T, k)
    y = b.ReduceSum(b.Mul(windows, weight), b.const([3]), keepdims=0)
    if node.input[INPUTS.index(bias)]:
        y = b.Add(y, b.Unsqueeze(bias, column))
    if settings["activation"] != causal_conv.ACTIVATIONS[0]:
        y = b.Mul(y, b.Sigmoid(y))
    kept = b.Range(b.const(0), b.Squeeze(b.Shape(past, start=2)), b.const(1))
    at = b.Unsqueeze(b.Add(b.Unsqueeze(rows.lengths, column), kept), b.const([2]))
    last = b.GatherND(b.Transpose(seen, perm=channels_last), at, batch_dims=1)
    outputs = (
        rows.joined(b.Transpose(y, perm=channels_last)),
        b.Transpose(last, perm=channels_last),
    )
    return b.function(domain, name, INPUTS, dict(zip(OUTPUTS, outputs, strict=True)))
