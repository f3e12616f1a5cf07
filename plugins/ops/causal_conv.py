"""The op ``linexport.CausalConvWithState``: ONNX's depthwise causal convolution (opset 27), whole.

    y_t = f(bias + sum_j weight_j x_{t - (k-1) + j})   j = 0 ... k-1, per channel
    f   = identity, or silu(y) = y * sigmoid(y)

Channels first: input and output (B, C, T), weight (C, 1, k), bias (C), states (B, C, k-1). Values
before the first come from past_state, or are zero; present_state is the last k-1 values seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, defs, helper

from linexport.errors import OpError
from linexport.plugins.ops.body import Body
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
from linexport.plugins.ops.shapes import PartialShape, rank, same_dim

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATIONS = ("none", "silu", "swish")

Array = NDArray[np.float64]


def check(
    activation: str,
    input: PartialShape,
    weight: PartialShape,
    bias: PartialShape | None = None,
    past_state: PartialShape | None = None,
) -> int:
    """The kernel size, once the shapes have been compared.

    Raises:
        OpError: unknown activation, or shapes that contradict each other.
    """
    if activation not in ACTIVATIONS:
        raise OpError(f"activation is {activation!r}; expected one of {', '.join(ACTIVATIONS)}.")
    rank("input", input, 3)
    rank("weight", weight, 3)
    same_dim("weight", "channels", weight[0], input[1])
    same_dim("weight", "middle dimension", weight[1], 1)
    size = weight[2]
    if not isinstance(size, int) or size < 1:
        raise OpError(f"weight has kernel size {size}; expected a fixed size of at least 1.")
    if bias is not None:
        rank("bias", bias, 1)
        same_dim("bias", "channels", bias[0], input[1])
    if past_state is not None:
        rank("past_state", past_state, 3)
        for what, axis, expected in (("batch", 0, input[0]), ("channels", 1, input[1])):
            same_dim("past_state", what, past_state[axis], expected)
        same_dim("past_state", "length", past_state[2], size - 1)
    return size


def causal_conv(
    activation: str,
    input: Array,
    weight: Array,
    bias: Array | None = None,
    past_state: Array | None = None,
) -> tuple[Array, Array]:
    """The definition above in float64, position by position: output and present_state.

    Raises:
        OpError: shapes that do not fit.
    """
    optional = tuple(None if x is None else x.shape for x in (bias, past_state))
    size = check(activation, input.shape, weight.shape, *optional)
    batch, channels, length = input.shape
    past = np.zeros((batch, channels, size - 1)) if past_state is None else np.float64(past_state)
    seen = np.concatenate([past, np.float64(input)], axis=2)
    output = np.zeros(input.shape, np.float64)
    for t in range(length):
        output[:, :, t] = (seen[:, :, t : t + size] * weight[None, :, 0, :]).sum(-1)
    if bias is not None:
        output += bias[None, :, None]
    if activation != "none":
        output = output / (1 + np.exp(-output))
    return output, seen[:, :, length:]


def activation_of(node: Node) -> str:
    """One of ``ACTIVATIONS``."""
    return str(node.attributes.get("activation", ACTIVATIONS[0]))


def activated(b: Body, node: Node, y: str) -> str:
    """f(y) of the node, y in any layout."""
    return y if activation_of(node) == ACTIVATIONS[0] else str(b.Mul(y, b.Sigmoid(y)))


def eager(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    past_state: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """Return output and present_state, in differentiable PyTorch."""
    import torch
    from torch.nn import functional as F

    optional = (None if x is None else x.shape for x in (bias, past_state))
    size = check(activation, input.shape, weight.shape, *optional)
    if past_state is None:
        seen = F.pad(input, (size - 1, 0))
    else:
        seen = torch.cat([past_state, input], dim=2)
    output = F.conv1d(seen, weight, bias, groups=weight.shape[0])
    if activation != "none":
        output = F.silu(output)
    return output, seen[:, :, input.shape[2] :].clone()


def _oracle(attributes: Attributes, inputs: Inputs) -> tuple[Array, ...]:
    return causal_conv(attributes.get("activation", ACTIVATIONS[0]), **inputs)


def _infer(node: Node) -> Sequence[PartialShape]:
    size = check(activation_of(node), **node.shapes)
    x = node.shapes["input"]
    return [x, (x[0], x[1], size - 1)]


def _states(node: Node) -> list[StatePort]:
    size = check(activation_of(node), **node.shapes)
    channels = node.shapes["weight"][0]
    assert isinstance(channels, int)
    return [StatePort(3, 1, "conv", (channels, size - 1))]


def _portable(node: Node) -> tuple[Body, list[str]]:
    """Concat of past and input, a depthwise Conv, and the last k-1 positions.

    Computed in float32: Conv takes no bfloat16 in this operator set.
    """
    b = Body()
    x, weight, bias, past = (b.Cast(v, to=TensorProto.FLOAT) if v else "" for v in node.inputs)
    outputs = convolved(b, node, x, weight, bias, past)
    return b, [b.CastLike(out, node.inputs[0]) for out in outputs]


def convolved(b: Body, node: Node, x: str, weight: str, bias: str, past: str) -> tuple[str, str]:
    """Output and present state, (B, C, T) and (B, C, k-1), of what is in float32."""
    channels, size = node.shapes["weight"][0], node.shapes["weight"][2]
    assert isinstance(size, int)
    seen = b.Concat(past, x, axis=2) if past else b.Pad(x, b.const([0, 0, size - 1, 0, 0, 0]))
    y = activated(b, node, b.Conv(seen, weight, *([bias] if bias else []), group=channels))
    end = b.const([np.iinfo(np.int64).max])
    # Not -(k-1): for k = 1 that would be the whole sequence.
    start = b.Shape(x, start=2, end=3)
    return y, b.Slice(seen, start, end, b.const([2]))


def schema(name: str, doc: str, layout: str, state: str) -> defs.OpSchema:
    """The schema of a convolution whose values have a layout, and whose states a type."""
    return defs.OpSchema(
        name,
        DOMAIN,
        VERSION,
        doc=doc,
        inputs=[
            parameter("input", "T", layout),
            parameter("weight", "T", "(C, 1, k)"),
            parameter("bias", "T", "(C)", "Optional"),
            parameter("past_state", state, "(B, C, k - 1)", "Optional"),
        ],
        outputs=[
            parameter("output", "T", layout),
            parameter("present_state", state, "(B, C, k - 1)", "Optional"),
        ],
        type_constraints=activations(*dict.fromkeys(("T", state))),
        attributes=[
            defs.OpSchema.Attribute("activation", helper.make_attribute("activation", "none"))
        ],
    )


OP = Op(
    schema=schema("CausalConvWithState", __doc__ or "", "(B, C, T)", "T"),
    infer=_infer,
    portable=_portable,
    torch_schema="""causal_conv(
        Tensor input, Tensor weight, Tensor? bias, Tensor? past_state, str activation
    ) -> (Tensor, Tensor)""",
    eager=eager,
    oracle=_oracle,
    token_axis={"input": 2, "output": 2},
    states=_states,
    describe=lambda node: f"activation {activation_of(node)}",
    summary="A short convolution over the preceding tokens.",
)
