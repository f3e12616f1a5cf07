"""Quantised weights of ``linexport.MixtureOfExperts``, by ONNX Runtime's kernel for them.

    MixtureOfExperts(x, index, weight, up, down)
        ->  com.microsoft.QMoE(x, chosen, share, up', down')

    chosen[n, index[n, j]] = 1          share[n, index[n, j]] = weight[n, j]          else 0

The kernel takes its experts from the k largest values of ``chosen``, and mixes them by ``share``.
Rows of a gated ``up'`` alternate: gate, value, gate, value, ... Sizes must be multiples of a block.

A token has each of its experts once, and none counts less than zero: the kernel leaves out what
does. Routers take the largest of a softmax or of sigmoids. Both weights have the same bits.
``tools/bench_experts.py`` measures it against float32. What the kernel does not have is left to
``expert_products``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from linexport.plugins.ops.body import MICROSOFT, Body
from linexport.plugins.ops.mixture_of_experts import OP, ExpertFunction, function_of
from linexport.plugins.ops.op import DOMAIN, attribute_value
from linexport.plugins.ops.registry import known_shapes
from linexport.quantization.block_quantisation import Quantised
from linexport.quantization.quantisable import (
    BLOCK,
    LEAST_INPUTS,
    OTHER_READERS,
    Experts,
    KeptWeight,
    Use,
    Weight,
    few_inputs,
)

KERNELS = {ExpertFunction("silu", True): "swiglu", ExpertFunction("silu", False): "silu"}
"""Activations of the kernel; of GELU it has an approximation."""

PARTS = (2, 3, 11), (5, 6, 12)
"""Positions of values, scales and zero points among the inputs of the kernel, for both weights."""

INDEX, SHARE, UP = 1, 2, 3
"""Positions among the inputs of the node; ``down`` follows ``up``."""


def find_experts(
    model: onnx.ModelProto, values: Mapping[str, NDArray], integers: bool = True
) -> tuple[list[Weight], list[KeptWeight]]:
    """Return the weights of experts that can be quantised, and those that stay.

    Args:
        model: a model; its values may be external.
        values: floating-point values of its initializers, by name.
        integers: kernels for integer weights must have what is found.
    """
    found: list[Weight] = []
    kept: list[KeptWeight] = []
    sizes = known_shapes(model)
    readers = Counter(name for node in model.graph.node for name in node.input)
    for index, node in enumerate(model.graph.node):
        names = list(node.input[UP:])
        if (node.domain, node.op_type) != (DOMAIN, OP.name) or not values.keys() >= {*names}:
            continue
        up, down = (values[name].shape for name in names)
        shared = max(readers[name] for name in names) > 1
        reason = OTHER_READERS if shared else few_inputs(min(up[2], down[2]))
        if reason and integers:
            kept += [KeptWeight(name, reason) for name in names]
            continue
        chosen, block = sizes[node.input[INDEX]][-1], _block(up, down)
        fused = function(node) in KERNELS and block is not None and down[1] == up[2]
        share = node.input[SHARE]
        assert isinstance(chosen, int)
        uses = (Use(index, names[0], False, node.input[0]), Use(index, names[1], False, None))
        alternates = (fused and function(node).gated, False)
        found += [
            Weight(
                *(name, (use,), e * rows, inputs, block if fused and block else BLOCK),
                Experts(e, chosen, fused, pairs, share),
            )
            for name, use, (e, rows, inputs), pairs in zip(
                names, uses, (up, down), alternates, strict=True
            )
        ]
    return found, kept


def function(node: onnx.NodeProto) -> ExpertFunction:
    """Return what a node of experts computes between its products."""
    return function_of({a.name: attribute_value(a) for a in node.attribute})


def _block(up: tuple[int, ...], down: tuple[int, ...]) -> int | None:
    """Return the largest block that divides the inputs of both weights."""
    fitting = (b for b in (BLOCK, LEAST_INPUTS) if up[2] % b == down[2] % b == 0)
    return next(fitting, None)


def by_expert(rows: NDArray, experts: Experts) -> NDArray:
    """Return rows (E F, ...) in the order of the kernel, (E, F, ...)."""
    shape = rows.shape[1:]
    if not experts.alternates:
        return rows.reshape(experts.count, -1, *shape)
    halves = rows.reshape(experts.count, 2, -1, *shape)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(experts.count, -1, *shape)


def replacement(
    node: onnx.NodeProto, up: tuple[Weight, Quantised], down: tuple[Weight, Quantised], level: int
) -> Iterator[onnx.NodeProto]:
    """Yield nodes that compute what a node of experts does, from quantised weights.

    Args:
        node: the node.
        up: its first weights, with their values.
        down: its second ones.
        level: ``accuracy_level`` of the kernel's products.
    """
    x, index, weight = node.input[:UP]
    experts = up[0].experts
    assert experts is not None
    b = Body()
    tokens = b.Shape(weight, start=0, end=1)
    nothing = b.Expand(b.const(0.0), b.Concat(tokens, b.const([experts.count]), axis=0))
    ones = b.Expand(b.const(1.0), b.Shape(index))
    chosen = b.ScatterElements(nothing, index, ones, axis=1)
    share = b.ScatterElements(nothing, index, weight, axis=1)
    (q1, s1, z1), (q2, s2, z2) = (own.parts for own, _ in (up, down))
    y = b.node(
        "QMoE",
        *(x, chosen, q1, s1, "", q2, s2, "", "", "", "", z1, z2, "", share),
        domain=MICROSOFT,
        k=experts.chosen,
        activation_type=KERNELS[function(node)],
        swiglu_fusion=int(experts.alternates),
        activation_alpha=1.0,
        activation_beta=0.0,
        expert_weight_bits=up[1].grid.bits,
        block_size=up[1].grid.block,
        accuracy_level=level,
        normalize_routing_weights=0,
    )
    yield from inlined(b, y, node.output[0], "quantised")


def needs_int8(node: onnx.NodeProto) -> bool:
    """Return whether the kernel rounds activations of this node at every ``accuracy_level``."""
    bits = next((a.i for a in node.attribute if a.name == "expert_weight_bits"), None)
    return node.op_type == "QMoE" and bits == 8


def in_float32(
    node: onnx.NodeProto, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[onnx.NodeProto]:
    """Yield nodes that compute what a quantised node of experts does, activations in float32.

    The kernel has that for 4 bits only. All experts are computed for all tokens:

        up = (q - z) s,   h = x up^T,   y = sum_e share_e (f(h_e) down_e^T)

    Args:
        node: the node.
        shapes: of initializers, by name.
    """
    x, share = node.input[0], node.input[14]
    given = {a.name: attribute_value(a) for a in node.attribute}
    b = Body()
    up, down = (_transposed(b, [node.input[i] for i in at], shapes) for at in PARTS)
    h = b.MatMul(b.Unsqueeze(x, b.const([0])), up)
    if given["activation_type"] == "swiglu":
        pairs = b.Reshape(h, b.const([0, 0, -1, 2]))
        gate, value = (b.Gather(pairs, b.const(i), axis=3) for i in (0, 1))
        h = b.Mul(b.Mul(gate, b.Sigmoid(gate)), value)
    else:
        h = b.Mul(h, b.Sigmoid(h))
    shares = b.Unsqueeze(b.Transpose(share, perm=[1, 0]), b.const([2]))
    y = b.ReduceSum(b.Mul(b.MatMul(h, down), shares), b.const([0]), keepdims=0)
    yield from inlined(b, y, node.output[0], "float32")


def _transposed(b: Body, parts: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Write (q - z) s of 8 bits, (E, K, N)."""
    values, scales, zeros = parts
    centred = b.Sub(
        b.Cast(b.Reshape(values, b.const([*shapes[scales], -1])), to=TensorProto.FLOAT),
        b.Unsqueeze(b.Cast(zeros, to=TensorProto.FLOAT), b.const([3])),
    )
    matrix = b.Reshape(b.Mul(centred, b.Unsqueeze(scales, b.const([3]))), b.const([0, 0, -1]))
    return str(b.Transpose(matrix, perm=[0, 2, 1]))


def inlined(b: Body, y: str, output: str, form: str) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a body in a graph, where its output ``y`` has this name."""
    own = {name: f"{output}/{form}/{name}" for node in b.nodes for name in node.output} | {
        y: output
    }
    for node in b.nodes:
        for names in (node.input, node.output):
            names[:] = [own.get(name, name) for name in names]
        yield node
