"""The op ``linexport.LeakySum`` of another package: a sum that forgets, for every channel.

    y_t = rate y_{t-1} + x_t,   y_0 = past_sum or zero

x and y (B, T, C), past_sum and present_sum (B, C).
"""

import numpy as np
import torch
from onnx import defs, helper

from linexport.models.torch_ops import call
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.op import DOMAIN, VERSION, Op, StatePort, activations, parameter
from linexport.plugins.ops.shapes import rank, same_dim


def infer(node):
    x, past = node.shapes["x"], node.shapes.get("past_sum")
    rank("x", x, 3)
    if past is not None:
        rank("past_sum", past, 2)
        same_dim("past_sum", "batch", past[0], x[0])
        same_dim("past_sum", "channels", past[1], x[2])
    return [x, (x[0], x[2])]


def eager(x, past_sum=None, rate=0.5):
    y = torch.zeros_like(x[:, 0]) if past_sum is None else past_sum
    outputs = []
    for t in range(x.shape[1]):
        y = rate * y + x[:, t]
        outputs.append(y)
    return torch.stack(outputs, 1), y


def oracle(attributes, inputs):
    x = np.float64(inputs["x"])
    y = np.float64(inputs.get("past_sum", np.zeros(x[:, 0].shape)))
    outputs = np.zeros_like(x)
    for t in range(x.shape[1]):
        y = outputs[:, t] = attributes.get("rate", 0.5) * y + x[:, t]
    return outputs, y


def portable(node):
    """A Scan over tokens."""
    b, (x, past) = Body(), node.inputs
    channels = b.const([node.shapes["x"][2]])
    start = past or b.Expand(
        b.CastLike(b.const(0.0), x), b.Concat(b.Shape(x, start=0, end=1), channels, axis=0)
    )
    token = Body(b)
    y, x_t = token.fresh("y"), token.fresh("x")
    rate = token.CastLike(token.const(float(node.attributes.get("rate", 0.5))), x_t)
    after = token.Add(token.Mul(rate, y), x_t)
    last, outputs = b.Scan(
        start,
        x,
        outputs=2,
        body=token.subgraph("token", [y, x_t], [after, token.Identity(after)]),
        num_scan_inputs=1,
        scan_input_axes=[1],
        scan_output_axes=[1],
    )
    return b, [outputs, last]


OP = Op(
    schema=defs.OpSchema(
        "LeakySum",
        DOMAIN,
        VERSION,
        doc=__doc__,
        inputs=[
            parameter("x", "T", "(B, T, C)"),
            parameter("past_sum", "T", "(B, C)", "Optional"),
        ],
        outputs=[
            parameter("y", "T", "(B, T, C)"),
            parameter("present_sum", "T", "(B, C)", "Optional"),
        ],
        type_constraints=activations("T"),
        attributes=[defs.OpSchema.Attribute("rate", helper.make_attribute("rate", 0.5))],
    ),
    infer=infer,
    portable=portable,
    torch_schema="leaky_sum(Tensor x, Tensor? past_sum=None, float rate=0.5) -> (Tensor, Tensor)",
    eager=eager,
    oracle=oracle,
    token_axis={"x": 1, "y": 1},
    states=lambda node: [StatePort(1, 1, "sum", (node.shapes["x"][2],))],
    describe=lambda node: f"rate {node.attributes.get('rate', 0.5)}",
)


class Model(torch.nn.Module):
    """The op between two projections, behind learned positions."""

    def __init__(self):
        super().__init__()
        self.positions = torch.nn.Embedding(64, 8)
        self.inside, self.outside = torch.nn.Linear(8, 6), torch.nn.Linear(6, 4)

    def forward(self, x):
        x = self.inside(x + self.positions(torch.arange(x.shape[1])))
        return self.outside(call(OP, x, rate=0.75)[0])


def model():
    return Model(), (torch.randn(2, 9, 8),)
