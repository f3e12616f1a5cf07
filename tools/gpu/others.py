"""Cases of StabilizedExp, CausalConvTokens and FeatureMap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu import maps
from gpu.case import Array, Case, padded
from linexport.plugins.ops import stabilized_exp
from linexport.plugins.ops.causal_conv_tokens import causal_conv_tokens
from linexport.plugins.ops.op import Node


@dataclass(frozen=True)
class Exponentials(Case):
    """StabilizedExp; its tensors are float32 whatever the type of the activations.

    Attributes:
        shared: heads of the keys; None: as many as of the queries.
        decayed: the maximum decays, by channel.
        masked: the last tokens of a sequence are padding.
    """

    shared: int | None = None
    causal: bool = True
    decayed: bool = False
    masked: bool = False

    def node(self) -> Node:
        keys = self.shared or self.heads
        widths = {"query": self.heads * self.width, "key": keys * self.width}
        shapes: dict[str, Any] = {name: ("B", "T", width) for name, width in widths.items()}
        if self.causal:
            shapes["past_key_max"] = ("B", keys, self.width)
        if self.masked:
            shapes["key_mask"] = ("B", "T")
        if self.decayed:
            shapes["decay"] = ("B", "T", keys * self.width)
        names = tuple(name if name in shapes else "" for name in stabilized_exp.INPUTS)
        attributes = {"q_num_heads": self.heads, "k_num_heads": keys, "causal": int(self.causal)}
        return Node("StabilizedExp", attributes, names, shapes)

    def fill(self, name: str, x: Array) -> Array:
        if name == "key_mask":
            return padded(x.shape)
        return np.float32(-np.abs(x) / 8 if name == "decay" else 3 * x)

    def wanted(self, given: Mapping[str, Array]) -> dict[str, Array]:
        heads = self.heads, self.shared or self.heads
        found = stabilized_exp.stabilized_exp(*heads, self.causal, **given)
        names = ("query_features", "key_features", "present_decay", "present_key_max")
        return dict(zip(names, found, strict=True))

    def bytes(self) -> int:
        keys = self.shared or self.heads
        per_token = 2 * self.heads + (3 + self.decayed) * keys
        states = keys * (1 + self.causal)
        return self.batch * self.width * (self.length * per_token + states) * 4


@dataclass(frozen=True)
class Convolution(Case):
    """CausalConvTokens of ``heads * width`` channels: four taps, SiLU, a past in float32."""

    def node(self) -> Node:
        channels = self.heads * self.width
        shapes: dict[str, Any] = {
            "input": ("B", "T", channels),
            "weight": (channels, 1, 4),
            "past_state": ("B", channels, 3),
        }
        inputs = ("input", "weight", "", "past_state")
        return Node("CausalConvTokens", {"activation": "silu"}, inputs, shapes)

    def fill(self, name: str, x: Array) -> Array:
        return x.astype(np.float32) if name == "past_state" else super().fill(name, x)

    def wanted(self, given: Mapping[str, Array]) -> dict[str, Array]:
        x, weight, past = (np.float64(given[n]) for n in ("input", "weight", "past_state"))
        found = causal_conv_tokens("silu", x, weight, None, past)
        return dict(zip(("output", "present_state"), found, strict=True))

    def bytes(self) -> int:
        per_channel = (2 * self.batch * self.length + 4) * self.wide + 2 * self.batch * 3 * 4
        return self.heads * self.width * per_channel


@dataclass(frozen=True)
class Map(Case):
    """FeatureMap on its own: random features, as many as a head is wide, or products."""

    kind: str = "favor+"

    def node(self) -> Node:
        shapes: dict[str, Any] = {"x": ("B", "T", self.heads * self.width)}
        if self.kind == "favor+":
            shapes["parameter_0"] = (self.width, self.width)
        return Node(
            "FeatureMap", {"kind": self.kind, "num_heads": self.heads}, tuple(shapes), shapes
        )

    def fill(self, name: str, x: Array) -> Array:
        return x.astype(np.float32) if name == "parameter_0" else super().fill(name, x)

    def wanted(self, given: Mapping[str, Array]) -> dict[str, Array]:
        x = np.float64(given["x"])
        w = np.float64(given["parameter_0"]) if "parameter_0" in given else None
        y = maps.phi(self.kind, x.reshape(*x.shape[:2], self.heads, self.width), w)
        return {"y": y.reshape(*x.shape[:2], -1)}

    def bytes(self) -> int:
        features = maps.features(self.kind, self.width)
        return self.batch * self.length * self.heads * (self.width + features) * self.wide
