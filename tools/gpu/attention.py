"""Cases of LinearAttention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu import maps
from gpu.case import Array, Case, padded
from linexport.plugins.ops.linear_attention import INPUTS, LinearAttentionSpec, linear_attention
from linexport.plugins.ops.op import Node


@dataclass(frozen=True)
class Attention(Case):
    """LinearAttention.

    Attributes:
        shared: query and key heads in which the heads of the values share.
        queries: query heads that share in ``heads`` of keys and values.
        value_width: of a value head; None: as wide as a query's.
        channel: a decay for every channel.
        masked: the last tokens of a sequence are padding.
    """

    rule: str = "linear"
    channel: bool = False
    normalize: bool = False
    causal: bool = True
    feature_map: str = ""
    shared: int | None = None
    queries: int | None = None
    value_width: int | None = None
    masked: bool = False

    @property
    def spec(self) -> LinearAttentionSpec:
        """Its attributes."""
        return LinearAttentionSpec(
            self.queries or self.shared or self.heads,
            self.heads,
            self.rule,
            causal=self.causal,
            normalize=self.normalize,
            scale=self.width**-0.5,
            eps=1e-6 * self.normalize,
        )

    @property
    def features(self) -> int:
        """Width of a query or key head behind the map."""
        return maps.features(self.feature_map, self.width)

    def node(self) -> Node:
        keys, d_v = self.shared or self.heads, self.value_width or self.width
        shapes: dict[str, Any] = {
            "query": ("B", "T", self.spec.q_num_heads * self.width),
            "key": ("B", "T", keys * self.width),
            "value": ("B", "T", self.heads * d_v),
        }
        if self.causal:
            shapes["past_state"] = ("B", self.heads, self.features, d_v)
            if self.normalize:
                shapes["past_normalizer"] = ("B", self.heads, self.features)
        if self.spec.has_decay:
            width = self.features if self.channel else 1
            shapes["decay"] = ("B", "T", self.heads * width)
        if self.spec.has_beta:
            shapes["beta"] = ("B", "T", self.heads)
        if self.masked:
            shapes["key_mask"] = ("B", "T")
        attributes = self.spec.attributes()
        names = [name if name in shapes else "" for name in INPUTS]
        if self.feature_map:
            attributes["feature_map"] = self.feature_map
        if self.feature_map == "favor+":
            shapes["parameter_0"] = (self.width, self.width)
            names.append("parameter_0")
        return Node("LinearAttention", attributes, tuple(names), shapes)

    def fill(self, name: str, x: Array) -> Array:
        """Keys of norm 1 for the delta rules, decays below zero, positive terms of denominators."""
        if name == "key_mask":
            return padded(x.shape)
        if name == "key" and self.spec.has_beta:
            heads = x.reshape(*x.shape[:2], -1, self.width)
            x = (heads / np.linalg.norm(heads, axis=-1, keepdims=True)).reshape(x.shape)
        if name in ("query", "key") and self.normalize and not self.feature_map:
            x = np.abs(x)
        if name == "decay":
            return np.float32(-np.abs(x) / 8)
        if name == "beta":
            x = 1 / (1 + np.exp(-x))
        if name == "past_normalizer":
            x = np.abs(x) + 1
        if name.startswith(("past", "parameter")):
            return x.astype(np.float32)
        return super().fill(name, x)

    def wanted(self, given: Mapping[str, Array]) -> dict[str, Array]:
        arrays = {n: x if x.dtype == bool else np.float64(x) for n, x in given.items()}
        w = arrays.pop("parameter_0", None)
        for name in ("query", "key"):
            heads = arrays[name].reshape(*arrays[name].shape[:2], -1, self.width)
            mapped = maps.phi(self.feature_map, heads, w)
            arrays[name] = mapped.reshape(*mapped.shape[:2], -1)
        names = ("output", "present_state", "present_normalizer")
        count = 3 if self.normalize else 2
        return dict(zip(names[:count], linear_attention(self.spec, **arrays), strict=False))

    def bytes(self) -> int:
        spec, d_v = self.spec, self.value_width or self.width
        keys = self.width * (spec.q_num_heads + (self.shared or self.heads))
        values = d_v * (self.heads + spec.output_heads)
        per_token = (keys + values + spec.has_beta * self.heads) * self.wide
        per_token += spec.has_decay * self.heads * (self.features if self.channel else 1) * 4
        states = self.batch * self.heads * self.features * (d_v + self.normalize)
        return self.batch * self.length * per_token + states * 4 * (1 + self.causal)
