"""Cases of LinearAttentionLayer: attention that computes its operands from a projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu.case import Array, Case
from linexport.plugins.kernels.expressions import (
    Applied,
    Convolution,
    Expression,
    Load,
    Number,
    Sum,
    View,
)
from linexport.plugins.kernels.launch import TYPES
from linexport.plugins.kernels.plans.attention_layer import AttentionLayer
from linexport.plugins.ops.causal_conv_tokens import causal_conv_tokens
from linexport.plugins.ops.linear_attention import INPUTS, LinearAttentionSpec, linear_attention
from linexport.plugins.ops.op import Node
from linexport.plugins.ops.shapes import PartialShape

EPS = 1e-6
"""Added to the squared norms of queries and keys."""


def gated_delta_layer(
    dtype: str, d_k: int, d_v: int, key_heads: int, heads: int, bias: bool = False, taps: int = 4
) -> tuple[AttentionLayer, dict[str, PartialShape]]:
    """Return a layer as Qwen3-Next has it, and the shapes of the tensors that it reads.

    One projection of everything, a convolution of query, key and value, norms of the first two,
    and gates.
    """
    keys, values = key_heads * d_k, heads * d_v
    channels = 2 * keys + values
    width = channels + 2 * heads

    def convolved(offset: int, head: int) -> Expression:
        view = View(offset, head, 1)
        x = Load(0, width, view)
        own = (1, 2 if bias else None, 3, 0, taps)
        return Convolution(x, *own, True, channels, view)

    def normed(x: Expression) -> Expression:
        root = Applied("Add", (Sum(Applied("Mul", (x, x)), d_k, 1.0), Number(EPS)))
        return Applied("Mul", (x, Applied("Reciprocal", (Applied("Sqrt", (root,)),))))

    step, rate = Load(0, width, View(channels, 1, 0)), Load(4, 0, View(0, 1, 0))
    softplus = Applied("Softplus", (Applied("Add", (step, Load(5, 0, View(0, 1, 0)))),))
    operands = {
        "query": normed(convolved(0, d_k)),
        "key": normed(convolved(keys, d_k)),
        "value": convolved(2 * keys, d_v),
        "decay": Applied("Neg", (Applied("Mul", (Applied("Exp", (rate,)), softplus)),)),
        "beta": Applied("Sigmoid", (Load(0, width, View(channels + heads, 1, 0)),)),
    }
    widths = {"query": keys, "key": keys, "value": values, "decay": heads, "beta": heads}
    shapes: dict[str, Any] = {name: ("B", "T", size) for name, size in widths.items()}
    shapes |= {"past_state": ("B", heads, d_k, d_v), "key_mask": ("B", "T")}
    names = tuple(name if name in shapes else "" for name in INPUTS)
    spec = LinearAttentionSpec(key_heads, heads, "gated_delta", scale=d_k**-0.5)
    node = Node("LinearAttention", spec.attributes(), names, shapes)
    own = TYPES[dtype]
    given: dict[str, PartialShape] = {
        "x0": ("B", "T", width),
        "x1": (channels, 1, taps),
        "x2": (channels,),
        "x3": ("B", channels, taps - 1),
        "x4": (heads,),
        "x5": (heads,),
    }
    return AttentionLayer(node, operands, (own, own, own, "fp32", "fp32", "fp32"), 1), given


@dataclass(frozen=True)
class Layer(Case):
    """``gated_delta_layer``; ``heads`` are those of the values.

    Attributes:
        shared: query and key heads.
    """

    shared: int = 16

    def layer(self) -> AttentionLayer:
        """Return what its kernels are planned from."""
        return self._made()[0]

    def node(self) -> Node:
        return self.layer().attention

    def tensors(self) -> Mapping[str, PartialShape]:
        layer, given = self._made()
        return {n: layer.attention.shapes[n] for n in ("past_state", "key_mask")} | given

    def states(self) -> dict[str, str]:
        return {**super().states(), "x3": "present_conv_0"}

    def fill(self, name: str, x: Array) -> Array:
        """Tokens are padding at random; states and parameters of decays are in float32."""
        if name == "key_mask":
            return np.asarray(x > -1)
        if name in ("past_state", "x3", "x4", "x5"):
            return x.astype(np.float32)
        return super().fill(name, x)

    def wanted(self, given: Mapping[str, Array]) -> dict[str, Array]:
        """By the formulas of the model, not by the expressions that the kernels evaluate."""
        x, weight, bias, past, rate, shift = (np.float64(given[f"x{i}"]) for i in range(6))
        keys = self.shared * self.width
        channels = len(weight)
        mixed, present = causal_conv_tokens("silu", x[..., :channels], weight, bias, past)
        query, key, value = np.split(mixed, [keys, 2 * keys], -1)
        step, rates = np.split(x[..., channels:], 2, -1)
        output, state, _ = linear_attention(
            LinearAttentionSpec.from_attributes(dict(self.node().attributes)),
            self._unit(query),
            self._unit(key),
            value,
            np.float64(given["past_state"]),
            decay=-np.exp(rate) * np.logaddexp(0, step + shift),
            beta=1 / (1 + np.exp(-rates)),
            key_mask=given["key_mask"],
        )
        return {"output": output, "present_state": state, "present_conv_0": present}

    def bytes(self) -> int:
        values = self.heads * self.width
        channels = 2 * self.shared * self.width + values
        per_token = (channels + 2 * self.heads + values) * self.wide + 1
        states = self.batch * (channels * 3 + values * self.width)
        return self.batch * self.length * per_token + channels * 5 * self.wide + 2 * 4 * states

    def _made(self) -> tuple[AttentionLayer, dict[str, PartialShape]]:
        sizes = (self.width, self.width, self.shared, self.heads)
        return gated_delta_layer(self.dtype, *sizes, bias=True)

    def _unit(self, x: Array) -> Array:
        """Rows (B, T, heads * width) with each head divided by its norm."""
        heads = x.reshape(*x.shape[:2], -1, self.width)
        return (heads / np.sqrt((heads * heads).sum(-1, keepdims=True) + EPS)).reshape(x.shape)
