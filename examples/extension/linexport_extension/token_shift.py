"""The op TokenShift: y_t = x_{t-1}, the token before, as RWKV mixes it in.

x and y are (B, T, C). The state is the last token, (B, C), zero where a sequence begins.
"""

import numpy as np
from onnx import defs

from linexport.plugins.ops.body import Body
from linexport.plugins.ops.op import DOMAIN, VERSION, Op, StatePort, parameter

FLOATS = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)"]


def eager(x, past=None):
    """Return y and the last token, in PyTorch."""
    import torch

    past = torch.zeros_like(x[:, 0]) if past is None else past
    joined = torch.cat([past.unsqueeze(1), x], 1)
    return joined[:, :-1], joined[:, -1]


def oracle(attributes, inputs):
    """Return the same in float64, token by token."""
    x = np.float64(inputs["x"])
    last = inputs.get("past", np.zeros_like(x[:, 0]))
    y = np.zeros_like(x)
    for t in range(x.shape[1]):
        y[:, t], last = last, x[:, t]
    return y, last


def portable(node):
    """Write the op in standard ONNX operators."""
    b = Body()
    x, past = node.inputs
    if past:
        first = b.Unsqueeze(past, b.const([1]))
    else:
        row = (b.Shape(x, start=0, end=1), b.const([1]), b.Shape(x, start=2, end=3))
        first = b.Expand(b.CastLike(b.const(0.0), x), b.Concat(*row, axis=0))
    joined = b.Concat(first, x, axis=1)
    y = b.Slice(joined, b.const([0]), b.const([-1]), b.const([1]))
    return b, [y, b.Gather(joined, b.const(-1), axis=1)]


OP = Op(
    schema=defs.OpSchema(
        "TokenShift",
        DOMAIN,
        VERSION,
        doc=__doc__,
        inputs=[
            parameter("x", "T", "(B, T, C)"),
            parameter("past", "T", "(B, C)", "Optional"),
        ],
        outputs=[
            parameter("y", "T", "(B, T, C)"),
            parameter("present", "T", "(B, C)", "Optional"),
        ],
        type_constraints=[("T", FLOATS, "Any precision.")],
    ),
    infer=lambda node: [node.shapes["x"], (node.shapes["x"][0], node.shapes["x"][2])],
    portable=portable,
    torch_schema="token_shift(Tensor x, Tensor? past=None) -> (Tensor, Tensor)",
    eager=eager,
    oracle=oracle,
    token_axis={"x": 1, "y": 1},
    states=lambda node: [StatePort(1, 1, "token", (int(node.shapes["x"][2]),))],
    summary="Every token mixed with the one before it.",
)
