"""Nodes on the kernels, run in Triton's interpreter and compared with float64 oracles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from linexport.models.feature_maps import find_map
from linexport.plugins.kernels.launch import TYPES as TYPES
from linexport.plugins.kernels.plan import plan_launches
from linexport.plugins.kernels.run import ELEMENTS as ELEMENTS
from linexport.plugins.kernels.run import run
from linexport.plugins.ops.linear_attention import INPUTS, LinearAttentionSpec
from linexport.plugins.ops.op import Node

TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 5e-3}
"""Relative to the largest sum of the magnitudes of an output's terms; in half precision about two
roundings of half a unit in the last place each, of an operand and of the output."""


@dataclass(frozen=True)
class Case:
    """A LinearAttention node on the kernels.

    Attributes:
        layout: of the node; d_k is the width behind the map.
        phi: attribute feature_map, and the same function on (..., width) float64 arrays.
        width: of a query or key head before the map; d_k where it is None.
        parameter: of the map.
    """

    layout: Any
    phi: tuple[str, Callable[[np.ndarray], np.ndarray]] | None = None
    width: int | None = None
    parameter: np.ndarray | None = None
    precision: str = "ieee"
    sm: int = 90

    def plan(self) -> Any:
        """The launches of the node."""
        shapes = self.layout.widths()
        spec, width = self.layout.spec, self.width or self.layout.d_k
        shapes["query"] = ("B", "T", spec.q_num_heads * width)
        shapes["key"] = ("B", "T", self.layout.key_heads * width)
        names = [name if name in shapes else "" for name in INPUTS]
        attributes = spec.attributes()
        if self.phi:
            attributes["feature_map"] = self.phi[0]
        if self.parameter is not None:
            shapes["parameter_0"] = self.parameter.shape
            names.append("parameter_0")
        node = Node("LinearAttention", attributes, tuple(names), shapes)
        return plan_launches(node, self.layout.dtype, self.sm, self.precision)

    def inputs(self, rng: np.random.Generator, batch: int, length: int) -> dict[str, torch.Tensor]:
        """Random tensors in the dtypes of the node."""
        arrays = self.layout.inputs(rng, batch, length)
        if self.phi:
            heads = {"query": self.layout.spec.q_num_heads, "key": self.layout.key_heads}
            for name, count in heads.items():
                size = (batch, length, count * (self.width or self.layout.d_k))
                arrays[name] = rng.normal(size=size)
        tensors = {}
        for name, x in arrays.items():
            tensors[name] = torch.from_numpy(x if x.dtype == bool else x.astype(np.float32))
            if name in ("query", "key", "value", "beta"):
                tensors[name] = tensors[name].to(getattr(torch, self.layout.dtype))
        return tensors

    def wanted(self, tensors: Mapping[str, torch.Tensor]) -> tuple[np.ndarray, ...]:
        """The oracle, on the same rounded inputs."""
        return self.layout.reference(self._behind_the_map(tensors))

    def magnitude(self, tensors: Mapping[str, torch.Tensor]) -> tuple[np.ndarray, ...]:
        """What rounding is relative to."""
        return self.layout.magnitude(self._behind_the_map(tensors))

    def _behind_the_map(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
        arrays = {n: wide(x) for n, x in tensors.items() if n in self.layout.widths()}
        if self.phi:
            for name in ("query", "key"):
                x = arrays[name]
                heads = x.reshape(*x.shape[:2], -1, self.width or self.layout.d_k)
                arrays[name] = self.phi[1](heads).reshape(*x.shape[:2], -1)
        return arrays

    def results(self, tensors: dict[str, torch.Tensor], in_place: bool) -> dict[str, torch.Tensor]:
        """Outputs to be filled: NaN, or the past where it is to be overwritten."""
        spec, layout = self.layout.spec, self.layout
        batch, length = tensors["query"].shape[:2]
        size = (batch, spec.kv_num_heads, layout.d_k)
        dtype = getattr(torch, layout.dtype)
        out = {"output": torch.full((batch, length, spec.output_heads * layout.d_v), np.nan)}
        out["output"] = out["output"].to(dtype)
        out["present_state"] = torch.full((*size, layout.d_v), np.nan)
        if spec.normalize:
            out["present_normalizer"] = torch.full(size, np.nan)
        if in_place:
            for name in self.plan().in_place:
                out[name] = tensors[name.replace("present", "past")]
        return out

    def run(
        self, tensors: dict[str, torch.Tensor], multiprocessors: int = 1, in_place: bool = False
    ) -> list[np.ndarray]:
        """Output, present state and, if there is one, present normaliser, in float64."""
        batch, length = tensors["query"].shape[:2]
        out = self.results(tensors, in_place)
        given = {**tensors, **out}
        if self.parameter is not None:
            given["parameter_0"] = torch.from_numpy(self.parameter.astype(np.float32))
        run(self.plan(), given, batch, length, multiprocessors)
        return [wide(x) for x in out.values()]

    def check(
        self,
        rng: np.random.Generator,
        batch: int,
        length: int,
        multiprocessors: int = 1,
        in_place: bool = False,
    ) -> None:
        """Run on random inputs and compare."""
        tensors = self.inputs(rng, batch, length)
        wanted, scale = self.wanted(tensors), self.magnitude(tensors)
        got = self.run(tensors, multiprocessors, in_place)
        assert_close(got, wanted, scale, TOLERANCE[self.layout.dtype])


def wide(x: torch.Tensor) -> np.ndarray:
    """As float64; a mask stays one."""
    return x.numpy() if x.dtype == torch.bool else x.to(torch.float64).numpy()


def assert_close(
    got: list[np.ndarray],
    wanted: tuple[np.ndarray, ...],
    scale: tuple[np.ndarray, ...],
    tolerance: float,
) -> None:
    """|got - wanted| <= tolerance |scale|, in the Euclidean norm of each result."""
    for position, g in enumerate(got):
        w = wanted[position]
        assert g.shape == w.shape
        assert np.isfinite(g).all(), f"result {position}"
        error, size = np.linalg.norm(g - w), np.linalg.norm(scale[position])
        assert error <= tolerance * size, f"result {position}: {error / size:.2e}"


@cache
def maps() -> dict[str, Any]:
    """By kind: width of a head, features, the map's own function in float64, its parameter."""
    w = np.random.default_rng(5).normal(size=(10, 30)).astype(np.float32)
    c = np.array([0.5], np.float32)
    widths: dict[str, Any] = dict.fromkeys(("identity", "relu", "elu1", "exp"), (20, 20, None))
    widths |= {"taylor2": (7, 36, None), "quadratic": (7, 28, None)}
    widths |= {"quadratic+c": (5, 21, c), "favor+": (10, 30, w)}

    def phi(kind: str, parameter: np.ndarray | None) -> Callable[[np.ndarray], np.ndarray]:
        frozen = () if parameter is None else (torch.from_numpy(parameter),)
        made = find_map(kind.removesuffix("+c"))
        return lambda x: np.asarray(made.phi(torch.from_numpy(x), *frozen))

    return {
        kind: (width, features, phi(kind, parameter), parameter)
        for kind, (width, features, parameter) in widths.items()
    }


def projected(w: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """favor+ with the projection w, in float64."""
    made, parameter = find_map("favor+"), torch.from_numpy(w)
    return lambda x: np.asarray(made.phi(torch.from_numpy(x), parameter))


RULE_OF = {"elu1": "linear", "channel": "gated", "kda": "gated_delta", "bidirectional": "linear"}


def node(variant: str, width: int, heads: int = 4) -> Node:
    """A LinearAttention node as models have them; ``variant`` is a rule or one of RULE_OF."""
    rule = RULE_OF.get(variant, variant)
    spec = LinearAttentionSpec(
        heads,
        heads,
        rule,
        causal=variant != "bidirectional",
        normalize=variant in ("elu1", "bidirectional"),
        eps=1e-6,
    )
    packed = ("B", "T", heads * width)
    shapes: dict[str, Any] = dict.fromkeys(("query", "key", "value"), packed)
    if spec.causal:
        shapes["past_state"] = ("B", heads, width, width)
    if spec.causal and spec.normalize:
        shapes["past_normalizer"] = ("B", heads, width)
    if spec.has_decay:
        shapes["decay"] = packed if variant in ("channel", "kda") else ("B", "T", heads)
    if spec.has_beta:
        shapes["beta"] = ("B", "T", heads)
    attributes = spec.attributes()
    if variant in ("elu1", "bidirectional"):
        attributes["feature_map"] = "elu1"
    return Node(
        "LinearAttention", attributes, tuple(n if n in shapes else "" for n in INPUTS), shapes
    )


def mapped(op: str, kind: str, width: int, parameter: np.ndarray | None) -> Node:
    """A node of that op with a feature map, two heads."""
    packed, names = ("B", "T", 2 * width), list(INPUTS[:3]) + [""] * 5
    attributes: dict[str, Any] = {"feature_map": kind, "q_num_heads": 2, "kv_num_heads": 2}
    shapes: dict[str, Any] = dict.fromkeys(names[:3], packed)
    if op == "FeatureMap":
        names, attributes, shapes = ["x"], {"kind": kind, "num_heads": 2}, {"x": packed}
    if parameter is not None:
        names, shapes["parameter_0"] = [*names, "parameter_0"], parameter.shape
    return Node(op, attributes, tuple(names), shapes)
