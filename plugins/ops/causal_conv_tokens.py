"""The op ``linexport.CausalConvTokens``: ``CausalConvWithState`` on tokens before channels.

    y_t = f(bias + sum_j weight_j x_{t - (k-1) + j})   j = 0 ... k-1, per channel
    f   = identity, or silu(y) = y * sigmoid(y)

Input and output are (B, T, C), as models have them; weight (C, 1, k), bias (C) and the states
(B, C, k-1) are those of ``causal_conv``. States are in float32 whatever the activations are.
Targets put it in the place of a CausalConvWithState and the transposes around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto

from linexport.plugins.ops import causal_conv
from linexport.plugins.ops.body import Body
from linexport.plugins.ops.causal_conv import ACTIVATIONS, Array, activation_of
from linexport.plugins.ops.op import Attributes, Inputs, Node, Op, StatePort
from linexport.plugins.ops.shapes import PartialShape, rank

if TYPE_CHECKING:
    from torch import Tensor


def check(node: Node) -> int:
    """The kernel size, once the shapes have been compared.

    Raises:
        OpError: unknown activation, or shapes that contradict each other.
    """
    shapes = dict(node.shapes)
    rank("input", shapes["input"], 3)
    batch, length, channels = shapes.pop("input")
    return causal_conv.check(activation_of(node), (batch, channels, length), **shapes)


def causal_conv_tokens(
    activation: str,
    input: Array,
    weight: Array,
    bias: Array | None = None,
    past_state: Array | None = None,
) -> tuple[Array, Array]:
    """The definition above in float64: output and present_state.

    Raises:
        OpError: shapes that do not fit.
    """
    turned = np.swapaxes(input, 1, 2)
    output, present = causal_conv.causal_conv(activation, turned, weight, bias, past_state)
    return np.swapaxes(output, 1, 2), present


def eager(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    past_state: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """Return output and present_state, in differentiable PyTorch."""
    past = None if past_state is None else past_state.to(input.dtype)
    turned = input.transpose(1, 2)
    output, present = causal_conv.eager(turned, weight, bias, past, activation)
    return output.transpose(1, 2).contiguous(), present.float()


def _oracle(attributes: Attributes, inputs: Inputs) -> tuple[Array, ...]:
    return causal_conv_tokens(attributes.get("activation", ACTIVATIONS[0]), **inputs)


def _infer(node: Node) -> Sequence[PartialShape]:
    size = check(node)
    x = node.shapes["input"]
    return [x, (x[0], x[2], size - 1)]


def _states(node: Node) -> list[StatePort]:
    size, channels = check(node), node.shapes["weight"][0]
    assert isinstance(channels, int)
    return [StatePort(3, 1, "conv", (channels, size - 1))]


def _portable(node: Node) -> tuple[Body, list[str]]:
    """Concat of past and input, channels first, a depthwise Conv, and the last k-1 positions.

    Computed in float32: Conv takes no bfloat16 in this operator set.
    """
    b = Body()
    *given, past = node.inputs
    x, weight, bias = (b.Cast(v, to=TensorProto.FLOAT) if v else "" for v in given)
    turned = b.Transpose(x, perm=[0, 2, 1])
    y, state = causal_conv.convolved(b, node, turned, weight, bias, past)
    return b, [b.CastLike(b.Transpose(y, perm=[0, 2, 1]), node.inputs[0]), state]


OP = Op(
    schema=causal_conv.schema("CausalConvTokens", __doc__ or "", "(B, T, C)", "S"),
    infer=_infer,
    portable=_portable,
    torch_schema="""causal_conv_tokens(
        Tensor input, Tensor weight, Tensor? bias, Tensor? past_state, str activation
    ) -> (Tensor, Tensor)""",
    eager=eager,
    oracle=_oracle,
    token_axis={"input": 1, "output": 1},
    states=_states,
    kernels="linexport.plugins.kernels.plans.causal_conv",
    describe=lambda node: f"activation {activation_of(node)}",
    summary="A short convolution over the preceding tokens, which come before the channels.",
)
