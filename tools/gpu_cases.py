"""The nodes that ``bench_gpu.py`` checks and times: their inputs, oracles and least traffic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from linexport.models.feature_maps import find_map
from linexport.plugins.ops.causal_conv import causal_conv
from linexport.plugins.ops.linear_attention import INPUTS, LinearAttentionSpec, linear_attention
from linexport.plugins.ops.op import Node

Tensors = dict[str, torch.Tensor]


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
        return torch.finfo(getattr(torch, self.dtype)).bits // 8

    def node(self) -> Node:
        """Return the node as the plugins see it."""
        raise NotImplementedError

    def results(self, given: Tensors, in_place: tuple[str, ...]) -> Tensors:
        """Return tensors to write: a poisoned output, and the present, in place if allowed."""
        raise NotImplementedError

    def wanted(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The oracle's results, in float64."""
        raise NotImplementedError

    def bytes(self) -> int:
        """Fewest bytes moved: every sequence once; every state once in and once out."""
        raise NotImplementedError

    def fill(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """An input as the op is used with, from a normal draw; in its dtype."""
        return x.to(getattr(torch, self.dtype))

    def tensors(self, device: str, seed: int = 0) -> Tensors:
        """Random inputs in the op's dtypes."""
        generator = torch.Generator(device).manual_seed(seed)
        sizes = {"B": self.batch, "T": self.length}
        return {
            name: self.fill(
                name,
                torch.randn([sizes.get(n, n) for n in shape], generator=generator, device=device),
            )
            for name, shape in self.node().shapes.items()
        }


@dataclass(frozen=True)
class Attention(Case):
    """LinearAttention, causal with a past."""

    rule: str = "linear"
    channel: bool = False
    normalize: bool = False
    causal: bool = True
    feature_map: str = ""

    @property
    def spec(self) -> LinearAttentionSpec:
        """Its attributes."""
        flags = {"causal": self.causal, "normalize": self.normalize, "eps": 1e-6 * self.normalize}
        return LinearAttentionSpec(
            self.heads, self.heads, self.rule, scale=self.width**-0.5, **flags
        )

    def node(self) -> Node:
        packed = ("B", "T", self.heads * self.width)
        shapes: dict[str, Any] = dict.fromkeys(("query", "key", "value"), packed)
        if self.causal:
            shapes["past_state"] = ("B", self.heads, self.width, self.width)
            if self.normalize:
                shapes["past_normalizer"] = ("B", self.heads, self.width)
        if self.spec.has_decay:
            shapes["decay"] = packed if self.channel else ("B", "T", self.heads)
        if self.spec.has_beta:
            shapes["beta"] = ("B", "T", self.heads)
        attributes = self.spec.attributes()
        if self.feature_map:
            attributes["feature_map"] = self.feature_map
        names = tuple(name if name in shapes else "" for name in INPUTS)
        return Node("LinearAttention", attributes, names, shapes)

    def fill(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Keys of norm 1 for the delta rules, decays below zero, a positive past normaliser."""
        if name == "key" and self.spec.has_beta:
            split = x.unflatten(-1, (self.heads, self.width))
            x = torch.nn.functional.normalize(split, dim=-1).flatten(-2)
        x = {"decay": lambda x: -x.abs() / 8, "beta": torch.sigmoid}.get(name, lambda x: x)(x)
        if name == "past_normalizer":
            x = x.abs() + 1
        return x if name.startswith("past") else super().fill(name, x)

    def results(self, given: Tensors, in_place: tuple[str, ...]) -> Tensors:
        out = {"output": torch.full_like(given["value"], float("nan"))}
        size = (self.batch, self.heads, self.width)
        device = given["value"].device
        for name, shape in (("state", (*size, self.width)), ("normalizer", size)):
            fresh = torch.full(shape, float("nan"), device=device)
            present = f"present_{name}"
            out[present] = given[f"past_{name}"] if present in in_place else fresh
        return out

    def wanted(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        arrays = dict(arrays)
        if self.feature_map:
            phi = find_map(self.feature_map).phi
            for name in ("query", "key"):
                heads = torch.from_numpy(arrays[name]).unflatten(-1, (self.heads, self.width))
                arrays[name] = phi(heads).flatten(-2).numpy()
        names = ("output", "present_state", "present_normalizer")
        count = 3 if self.normalize else 2
        return dict(zip(names[:count], linear_attention(self.spec, **arrays), strict=False))

    def bytes(self) -> int:
        tokens = self.batch * self.length * self.heads
        per_token = 4 * self.width + self.spec.has_beta
        per_token += self.spec.has_decay * (self.width if self.channel else 1)
        states = self.batch * self.heads * self.width * (self.width + self.normalize)
        return tokens * per_token * self.wide + states * 4 * (1 + self.causal)


@dataclass(frozen=True)
class Convolution(Case):
    """CausalConvWithState of ``heads * width`` channels: four taps, SiLU, a past."""

    def node(self) -> Node:
        channels = self.heads * self.width
        shapes: dict[str, Any] = {
            "input": ("B", channels, "T"),
            "weight": (channels, 1, 4),
            "past_state": ("B", channels, 3),
        }
        inputs = ("input", "weight", "", "past_state")
        return Node("CausalConvWithState", {"activation": "silu"}, inputs, shapes)

    def results(self, given: Tensors, in_place: tuple[str, ...]) -> Tensors:
        state = given["past_state"]
        if "present_state" not in in_place:
            state = torch.full_like(state, float("nan"))
        return {"output": torch.full_like(given["input"], float("nan")), "present_state": state}

    def wanted(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        past = arrays["past_state"]
        found = causal_conv("silu", arrays["input"], arrays["weight"], None, past)
        return dict(zip(("output", "present_state"), found, strict=True))

    def bytes(self) -> int:
        per_channel = 2 * self.batch * (self.length + 3) + 4
        return self.heads * self.width * per_channel * self.wide


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

    @property
    def features(self) -> int:
        """Number of features of one head."""
        width = self.width
        return width if self.kind == "favor+" else 1 + width + width * (width + 1) // 2

    def fill(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x if name == "parameter_0" else super().fill(name, x)

    def results(self, given: Tensors, in_place: tuple[str, ...]) -> Tensors:
        size = (self.batch, self.length, self.heads * self.features)
        return {"y": given["x"].new_full(size, float("nan"))}

    def wanted(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        heads = torch.from_numpy(arrays["x"]).unflatten(-1, (self.heads, self.width))
        frozen = (torch.from_numpy(arrays[n]) for n in arrays if n != "x")
        return {"y": find_map(self.kind).phi(heads, *frozen).flatten(-2).numpy()}

    def bytes(self) -> int:
        return self.batch * self.length * self.heads * (self.width + self.features) * self.wide


def small(case: Case, dtype: str) -> Case:
    """Shrink a case to sizes the float64 oracle takes, long enough to be cut into segments."""
    length = 1 if case.length == 1 else 2077
    return replace(case, batch=1, length=length, heads=2, dtype=dtype, target=None)


PREFILL = {"batch": 8, "length": 8192}
LONG = {"batch": 1, "length": 131072}
DECODE = {"batch": 256, "length": 1}
CASES: tuple[Case, ...] = (
    Attention("prefill linear", rule="linear", **PREFILL, target=1.6, peer="linear"),
    Attention(
        "prefill linear elu1 normalised",
        rule="linear",
        **PREFILL,
        normalize=True,
        feature_map="elu1",
    ),
    Attention("prefill gated", rule="gated", **PREFILL, target=1.6, peer="simple_gla"),
    Attention("prefill gated per channel", rule="gated", **PREFILL, channel=True, peer="gla"),
    Attention("prefill delta", rule="delta", **PREFILL, peer="delta"),
    Attention("prefill gated delta", rule="gated_delta", **PREFILL, peer="gated_delta"),
    Attention(
        "prefill gated delta per channel", rule="gated_delta", **PREFILL, channel=True, peer="kda"
    ),
    Attention(
        "bidirectional relu",
        rule="linear",
        **PREFILL,
        causal=False,
        normalize=True,
        feature_map="relu",
    ),
    Attention("long linear", rule="linear", **LONG, target=2.0, peer="linear"),
    Attention("long gated", rule="gated", **LONG, target=2.0, peer="simple_gla"),
    Attention("decode linear", rule="linear", **DECODE, target=1.3, peer="linear step"),
    Attention(
        "decode gated delta", rule="gated_delta", **DECODE, target=1.3, peer="gated_delta step"
    ),
    Attention("prefill linear d=64", rule="linear", **PREFILL, heads=32, width=64),
    Attention("prefill gated float16", rule="gated", **PREFILL, dtype="float16"),
    Attention("prefill gated float32", batch=2, length=8192, rule="gated", dtype="float32"),
    Convolution("convolution", **PREFILL),
    Convolution("convolution step", **DECODE),
    Map("map favor+", **PREFILL),
    Map("map taylor2 d=16", **PREFILL, width=16, kind="taylor2"),
)
