"""The nodes that are checked and timed on a GPU: their inputs, oracles and least traffic.

NumPy and the ops' own definitions are all that this needs: it runs where neither torch nor Triton
is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gpu import maps
from linexport.plugins.ops import stabilized_exp
from linexport.plugins.ops.causal_conv_tokens import causal_conv_tokens
from linexport.plugins.ops.linear_attention import INPUTS, LinearAttentionSpec, linear_attention
from linexport.plugins.ops.op import Node

Array = NDArray[Any]
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class Case:
    """One node and the sizes to run it at.

    Attributes:
        target: largest wanted multiple of the floor, where one is stated.
        peer: name of the peer that computes the same, if any.
    """

    name: str
    batch: int
    length: int
    heads: int = 16
    width: int = 128
    dtype: str = "bfloat16"
    target: float | None = None
    peer: str = ""

    @property
    def wide(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize

    def node(self) -> Node:
        """Return the node as the plugins see it."""
        raise NotImplementedError

    def wanted(self, given: Mapping[str, Array]) -> dict[str, Array]:
        """The oracle's results by name, in float64, of what ``inputs`` gave."""
        raise NotImplementedError

    def bytes(self) -> int:
        """Fewest bytes moved: every sequence once; every state once in and once out."""
        raise NotImplementedError

    def fill(self, name: str, x: Array) -> Array:
        """An input as the op is used with, from a normal draw; in its dtype."""
        return x.astype(DTYPES[self.dtype])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the inputs, by name."""
        sizes = {"B": self.batch, "T": self.length}
        return {
            name: tuple(int(sizes.get(n, n)) for n in shape)  # type: ignore[call-overload]
            for name, shape in self.node().shapes.items()
        }

    def inputs(self, seed: int = 0, most: int | None = None) -> dict[str, Array]:
        """Return random inputs; of a tensor about ``most`` values, to be repeated."""
        rng = np.random.default_rng(seed)
        found = {}
        for name, shape in self.shapes().items():
            if most and np.prod(shape) > most:
                shape = (1, max(most // int(np.prod(shape[2:])), 1), *shape[2:])
            found[name] = self.fill(name, rng.normal(size=shape).astype(np.float32))
        return found


@dataclass(frozen=True)
class Attention(Case):
    """LinearAttention.

    Attributes:
        shared: query and key heads in which the heads of the values share.
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
    value_width: int | None = None
    masked: bool = False

    @property
    def spec(self) -> LinearAttentionSpec:
        """Its attributes."""
        return LinearAttentionSpec(
            self.shared or self.heads,
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
        heads, d_v = self.shared or self.heads, self.value_width or self.width
        shapes: dict[str, Any] = dict.fromkeys(("query", "key"), ("B", "T", heads * self.width))
        shapes["value"] = ("B", "T", self.heads * d_v)
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
        d_v, shared = self.value_width or self.width, (self.shared or self.heads) / self.heads
        tokens = self.batch * self.length * self.heads
        per_token = (2 * self.width * shared + 2 * d_v + self.spec.has_beta) * self.wide
        per_token += self.spec.has_decay * (self.features if self.channel else 1) * 4
        states = self.batch * self.heads * self.features * (d_v + self.normalize)
        return int(tokens * per_token) + states * 4 * (1 + self.causal)


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


def padded(shape: tuple[int, ...]) -> Array:
    """A mask (B, T) by which sequence b lacks its last 5 (b + 1) tokens."""
    return np.arange(shape[1]) < shape[1] - 5 * np.arange(1, shape[0] + 1)[:, None]


def small(case: Case) -> Case:
    """Shrink a case to sizes the float64 oracle takes, long enough to be cut into segments."""
    return replace(case, batch=2, length=case.length if case.length < 8 else 1037)


PREFILL = {"batch": 8, "length": 8192}
LONG = {"batch": 1, "length": 131072}
DECODE = {"batch": 256, "length": 1}
ELU1 = {"normalize": True, "feature_map": "elu1"}
CASES: tuple[Case, ...] = (
    Attention("prefill linear", **PREFILL, target=1.6, peer="linear"),
    Attention("prefill linear elu1 normalised", **PREFILL, **ELU1),
    Attention("prefill gated", rule="gated", **PREFILL, target=1.6, peer="simple_gla"),
    Attention("prefill gated per channel", rule="gated", **PREFILL, channel=True, peer="gla"),
    Attention("prefill delta", rule="delta", **PREFILL, peer="delta"),
    Attention("prefill gated delta", rule="gated_delta", **PREFILL, peer="gated_delta"),
    Attention(
        "prefill gated delta per channel", rule="gated_delta", **PREFILL, channel=True, peer="kda"
    ),
    Attention("bidirectional relu", **PREFILL, causal=False, normalize=True, feature_map="relu"),
    Attention("long linear", **LONG, target=2.0, peer="linear"),
    Attention("long gated", rule="gated", **LONG, target=2.0, peer="simple_gla"),
    Attention("long gated delta", rule="gated_delta", **LONG, peer="gated_delta"),
    Attention("decode linear", **DECODE, target=1.3, peer="linear step"),
    Attention(
        "decode gated delta", rule="gated_delta", **DECODE, target=1.3, peer="gated_delta step"
    ),
    Attention("decode gated delta B=1", rule="gated_delta", batch=1, length=1),
    Attention("decode gated delta of 2 tokens", rule="gated_delta", batch=1, length=2),
    Attention("decode gated delta of 5 tokens", rule="gated_delta", batch=1, length=5),
    Attention("Qwen3-Next", rule="gated_delta", **PREFILL, heads=32, shared=16),
    Attention("Mamba2", rule="gated", **PREFILL, heads=24, shared=1, value_width=64),
    Attention("grouped queries", rule="gated", **PREFILL, shared=4),
    Attention("ragged batch", rule="gated_delta", **PREFILL, masked=True),
    Attention("ragged batch elu1", **PREFILL, **ELU1, masked=True),
    Attention("prefill linear d=48", **PREFILL, heads=32, width=48),
    Attention("prefill linear d=64", **PREFILL, heads=32, width=64),
    Attention("prefill gated d=80", rule="gated", **PREFILL, width=80),
    Attention("prefill gated delta d=100", rule="gated_delta", **PREFILL, width=100),
    Attention("prefill gated d=256", rule="gated", batch=4, length=8192, width=256),
    Attention("prefill gated float16", rule="gated", **PREFILL, dtype="float16"),
    Attention("prefill gated float32", batch=2, length=8192, rule="gated", dtype="float32"),
    Attention(
        "prefill gated delta float32", batch=2, length=8192, rule="gated_delta", dtype="float32"
    ),
    Attention("prefill elu1 float32", batch=2, length=8192, dtype="float32", **ELU1),
    Attention("prefill exp", **PREFILL, width=64, normalize=True, feature_map="exp"),
    Attention("prefill taylor2 d=16", **PREFILL, width=16, feature_map="taylor2"),
    Attention("prefill quadratic d=16", **PREFILL, width=16, feature_map="quadratic"),
    Attention("prefill favor+ d=64", **PREFILL, width=64, feature_map="favor+"),
    Exponentials("exponentials", **PREFILL, width=64, dtype="float32"),
    Exponentials("exponentials step", **DECODE, width=64, dtype="float32"),
    Exponentials("exponentials bidirectional", **PREFILL, width=64, dtype="float32", causal=False),
    Exponentials(
        "exponentials decayed, ragged, grouped",
        **PREFILL,
        width=64,
        dtype="float32",
        shared=4,
        decayed=True,
        masked=True,
    ),
    Attention(
        "prefill gated per channel normalised float32",
        **PREFILL,
        rule="gated",
        width=64,
        channel=True,
        normalize=True,
        dtype="float32",
    ),
    Convolution("convolution", **PREFILL),
    Convolution("convolution step", **DECODE),
    Convolution("convolution float32", batch=2, length=8192, dtype="float32"),
    Map("map favor+", **PREFILL),
    Map("map taylor2 d=16", **PREFILL, width=16, kind="taylor2"),
    Map("map quadratic d=16", **PREFILL, width=16, kind="quadratic"),
)
