"""CausalConvWithState in ONNX Runtime, on tokens before channels.

    seen = Concat(past^T, x^T)            (B, k - 1 + T, C)
    y^T  = f(Conv(seen as an image of one row, its channels last))

Models have tokens before channels, so the transposes around the op cancel those in here. ONNX
Runtime reorders such an image in blocks of channels, for which it has a depthwise kernel. Its Conv
on channels first takes 5 times as long for one token, and 1.2 times for 512; its kernel of the op,
as long for one token, and 2.5 times for 512.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from linexport.plugins.ops.body import Body
from linexport.plugins.ops.causal_conv import activated
from linexport.plugins.ops.op import Node

REASON = "a Conv on tokens before channels"


def channels_last(node: Node) -> tuple[Body, list[str]]:
    """See above; in float32."""
    b = Body()
    x, weight, bias, past = (b.Cast(v, to=TensorProto.FLOAT) if v else "" for v in node.inputs)
    channels, size = node.shapes["weight"][0], node.shapes["weight"][2]
    assert isinstance(size, int)
    x, time, row = b.Transpose(x, perm=[0, 2, 1]), b.const([1]), b.const([2])
    if past:
        seen = b.Concat(b.Transpose(past, perm=[0, 2, 1]), x, axis=1)
    else:
        seen = b.Pad(x, b.const([0, size - 1, 0, 0, 0, 0]))
    image = b.Transpose(b.Unsqueeze(seen, time), perm=[0, 3, 1, 2])
    kernel = b.Unsqueeze(weight, row)
    y = activated(b, node, b.Conv(image, kernel, *([bias] if bias else []), group=channels))
    # Not Squeeze, which ONNX Runtime would take before the transpose: then it reorders twice.
    y = b.Reshape(b.Transpose(y, perm=[0, 2, 3, 1]), b.const([0, -1, channels]))
    # Not -(k-1): for k = 1 that would be the whole sequence.
    start, end = b.Shape(x, start=1, end=2), b.const([np.iinfo(np.int64).max])
    state = b.Slice(seen, start, end, time)
    outputs = (b.Transpose(value, perm=[0, 2, 1]) for value in (y, state))
    return b, [b.CastLike(output, node.inputs[0]) for output in outputs]
