"""The linexport ops as differentiable PyTorch functions.

These are what the reference layers call. While ``torch.export`` traces, each call is recorded as
one operator of the ``linexport`` library (``linexport.models.torch_ops``) instead of the many
operators it is made of, so that linexport finds it again; anywhere else it is ordinary PyTorch.

Shapes and formulas are those of the op of the same name in ``linexport.plugins.ops``. Every
function raises OpError for attributes or shapes that contradict it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from linexport.models.torch_ops import call
from linexport.plugins.ops.causal_conv import OP as CAUSAL_CONV
from linexport.plugins.ops.generalized_delta_rule import OP as GENERALIZED_DELTA_RULE
from linexport.plugins.ops.linear_attention import OP as LINEAR_ATTENTION
from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from linexport.plugins.ops.mixture_of_experts import OP as MIXTURE_OF_EXPERTS
from linexport.plugins.ops.stabilized_exp import OP as STABILIZED_EXP
from linexport.plugins.ops.window_attention import OP as WINDOW_ATTENTION
from linexport.plugins.ops.window_attention import WindowSpec

Stabilized = tuple[Tensor, Tensor, Tensor, Tensor]
"""query_features, key_features, decay and present_key_max."""


class WindowOutputs(NamedTuple):
    """The outputs of ``window_attention``, in the order of the op."""

    output: Tensor
    maximum: Tensor
    total: Tensor
    left_key: Tensor
    left_value: Tensor
    left_mask: Tensor
    present_key: Tensor
    present_value: Tensor
    present_seen: Tensor
    present_sink_key: Tensor
    present_sink_value: Tensor
    present_left: Tensor


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_state: Tensor | None = None,
    past_normalizer: Tensor | None = None,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    key_mask: Tensor | None = None,
    decay_scale: Tensor | None = None,
    **attributes: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, present_state and present_normalizer.

    ``attributes`` are the fields of ``LinearAttentionSpec``; q_num_heads and kv_num_heads are
    required. The output has the dtype of the inputs; half precision is computed in float32, and
    states are then float32.
    """
    tensors = (query, key, value, past_state, past_normalizer, decay, beta, key_mask)
    spec = LinearAttentionSpec(**attributes)
    out: tuple[Tensor, Tensor, Tensor] = call(
        LINEAR_ATTENTION, *tensors, decay_scale=decay_scale, **spec.attributes()
    )
    return out


def causal_conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    past_state: Tensor | None = None,
    activation: str = "none",
) -> tuple[Tensor, Tensor]:
    """Return a depthwise causal convolution over the last axis of (B, C, T), and present_state."""
    out: tuple[Tensor, Tensor] = call(CAUSAL_CONV, input, weight, bias, past_state, activation)
    return out


def generalized_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    a: Tensor,
    b: Tensor,
    past_state: Tensor | None = None,
    key_mask: Tensor | None = None,
    *,
    num_heads: int,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the output, in the dtype of the inputs, and present_state.

    Half-precision inputs are computed in float32, and the state is then float32.
    """
    tensors = (query, key, value, decay, a, b, past_state, key_mask)
    out: tuple[Tensor, Tensor] = call(
        GENERALIZED_DELTA_RULE, *tensors, num_heads=num_heads, scale=scale
    )
    return out


def stabilized_exp(
    query: Tensor,
    key: Tensor,
    past_key_max: Tensor | None = None,
    key_mask: Tensor | None = None,
    decay: Tensor | None = None,
    *,
    q_num_heads: int,
    k_num_heads: int,
    causal: bool = True,
) -> Stabilized:
    """Return features (B, T, H * M) of exponents, their decay and the maxima (B, H_k, M).

    Computed, and returned, at least in float32.
    """
    inputs = (query, key, past_key_max, key_mask, decay)
    out: Stabilized = call(STABILIZED_EXP, *inputs, q_num_heads, k_num_heads, int(causal))
    return out


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past: Sequence[Tensor | None] = (None,) * 6,
    key_mask: Tensor | None = None,
    *,
    spec: WindowSpec,
) -> WindowOutputs:
    """Return softmax attention to the last tokens, the tokens that leave them, and the states.

    ``past`` are the six states of an earlier call, in their order. Output, keys and values have the
    dtype of the inputs; the others are at least float32.
    """
    return WindowOutputs(*call(WINDOW_ATTENTION, query, key, value, *past, key_mask, **vars(spec)))


def mixture_of_experts(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    activation: str = "silu",
    gated: bool = True,
    gate_cap: float = 0.0,
    value_cap: float = 0.0,
) -> Tensor:
    """Return y (N, H_out), in the dtype of x."""
    y: Tensor = call(
        MIXTURE_OF_EXPERTS,
        x,
        index,
        weight,
        up,
        down,
        activation=activation,
        gated=int(gated),
        gate_cap=gate_cap,
        value_cap=value_cap,
    )
    return y
