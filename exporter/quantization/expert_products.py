"""Quantised weights of ``linexport.MixtureOfExperts``, by two products for each expert.

    p          pairs (token, expert), sorted by expert; those of expert e are p_e
    h_e        =  MatMulNBits(x[p_e], up_e)            f(h), of all experts at once
    y_n        =  sum_j weight_nj MatMulNBits(f(h)_e, down_e)

For what ONNX Runtime's kernel for experts does not have: other activations, soft caps, widths that
no block divides, and routers that give negative weights. A product of no rows returns at once, so
an unused expert costs about a microsecond. ``tools/bench_experts.py`` measures these products, and
for relu2 the kernel too, which needs every row of ``up`` twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from linexport.plugins.ops.body import MICROSOFT, Body
from linexport.plugins.ops.mixture_of_experts import apply_function, sort_pairs
from linexport.quantization.block_quantisation import Quantised
from linexport.quantization.experts import UP, function, inlined
from linexport.quantization.quantisable import Experts, Weight


def without_kernel(weight: Weight, experts: Experts) -> Weight:
    """Return a weight of experts as one that products read."""
    return replace(weight, experts=replace(experts, fused=False, alternates=False))


def initializers(weight: Weight, quantised: Quantised) -> Iterator[TensorProto]:
    """Yield values (F, blocks, bytes), scales and, where stored, zero points of every expert."""
    assert weight.experts is not None
    for part, array in quantised.packed().items():
        own = array.reshape(weight.experts.count, -1, *array.shape[1:])
        for name, values in zip(_names(weight, part), own, strict=True):
            yield numpy_helper.from_array(np.ascontiguousarray(values), name)


def _names(weight: Weight, part: str) -> list[str]:
    """Return the names of a part of the weight, one an expert."""
    assert weight.experts is not None
    return [f"{weight.name}/{expert}/{part}" for expert in range(weight.experts.count)]


def replacement(
    node: onnx.NodeProto, up: tuple[Weight, Quantised], down: tuple[Weight, Quantised], level: int
) -> Iterator[onnx.NodeProto]:
    """Yield nodes that compute what a node of experts does; see ``experts.replacement``."""
    x, index, weight = node.input[:UP]
    experts = up[0].experts
    assert experts is not None
    b = Body()
    flat, chosen = b.Reshape(index, b.const([-1])), b.const(experts.chosen)
    _, order, counts = sort_pairs(b, flat, experts.count)
    h = _products(b, b.Gather(x, b.Div(order, chosen)), counts, *up, level)
    h = apply_function(b, function(node), h)
    y = _products(b, h, counts, *down, level)
    numbers = b.Range(b.const(0), b.Size(flat), b.const(1))
    # In the order of the tokens again.
    y = b.Gather(y, b.ScatterElements(numbers, order, numbers))
    width = down[0].outputs // experts.count
    y = b.Reshape(y, b.const([-1, experts.chosen, width]))
    y = b.Squeeze(b.MatMul(b.Unsqueeze(weight, b.const([1])), y), b.const([1]))
    yield from inlined(b, y, node.output[0], "quantised")


def _products(
    b: Body, rows: str, counts: str, weight: Weight, quantised: Quantised, level: int
) -> str:
    """Write the product of every expert with its rows, (pairs, F)."""
    experts, grid = weight.experts, quantised.grid
    assert experts is not None
    stored = zip(*(_names(weight, part) for part in quantised.packed()), strict=True)
    own = _split(b, rows, counts, experts.count)
    outputs = [
        b.node(
            "MatMulNBits",
            *(given, *parts),
            domain=MICROSOFT,
            K=weight.inputs,
            N=weight.outputs // experts.count,
            accuracy_level=level,
            bits=grid.bits,
            block_size=grid.block,
        )
        for given, parts in zip(own, stored, strict=True)
    ]
    return str(b.Concat(*outputs, axis=0))


def _split(b: Body, rows: str, counts: str, experts: int) -> Sequence[str]:
    parts = b.Split(rows, counts, outputs=experts, axis=0)
    return [parts] if experts == 1 else list(parts)
