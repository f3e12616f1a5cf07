"""Quantised weights of ``linexport.MixtureOfExperts`` in engines: all experts as one layer.

    h (N, E F)  =  x up^T                     up (E F, K): the experts' rows one after another
    y           =  (share f(h)) down^T        down (D, E F): their columns side by side

share is zero for experts that a token did not choose. TensorRT takes no sizes that come from
values: in any form every expert is computed for every token. These are two products, of weights
that stay packed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import onnx
from onnx import TensorProto

from linexport.plugins.ops.body import Body
from linexport.plugins.ops.mixture_of_experts import apply_function
from linexport.quantization.block_quantisation import Quantised
from linexport.quantization.experts import UP, function, inlined
from linexport.quantization.quantisable import Experts, Weight


def as_one_layer(weight: Weight, experts: Experts) -> Weight:
    """Return a weight of experts as one product reads it."""
    own = replace(experts, fused=False, alternates=False)
    if weight.activations:
        return replace(weight, experts=own)
    columns = replace(own, side_by_side=True)
    outputs, inputs = weight.outputs // own.count, weight.inputs * own.count
    return replace(weight, outputs=outputs, inputs=inputs, experts=columns)


def replacement(
    node: onnx.NodeProto, up: tuple[Weight, Quantised], down: tuple[Weight, Quantised]
) -> Iterator[onnx.NodeProto]:
    """Yield nodes that compute what a node of experts does; see ``experts.replacement``."""
    x, index, weight = node.input[:UP]
    experts = up[0].experts
    assert experts is not None
    b = Body()
    h = b.MatMul(x, dequantised(b, *up))
    h = apply_function(b, function(node), b.Reshape(h, b.const([0, experts.count, -1])))
    numbers = b.const(np.arange(experts.count).reshape(1, 1, -1))
    chosen = b.Equal(b.Unsqueeze(index, b.const([2])), numbers)
    wide = b.Unsqueeze(b.Cast(weight, to=TensorProto.FLOAT), b.const([2]))
    share = b.ReduceSum(b.Where(chosen, wide, b.const(0.0)), b.const([1]), keepdims=0)
    share = b.Unsqueeze(share, b.const([2]))
    mixed = b.Mul(b.Cast(h, to=TensorProto.FLOAT), share)
    # An expert that was not chosen may be infinite.
    mixed = b.Where(b.Equal(share, b.const(0.0)), b.const(0.0), mixed)
    rows = b.CastLike(b.Reshape(mixed, b.const([0, -1])), x)
    yield from inlined(b, b.MatMul(rows, dequantised(b, *down)), node.output[0], "experts")


def dequantised(b: Body, weight: Weight, quantised: Quantised) -> str:
    """Write the matrix (K, N) of values (K, N), and of scales (blocks, N) or (N,)."""
    (values, scales, _), grid = weight.parts, quantised.grid
    if grid.bits == 4:
        return str(b.DequantizeLinear(values, scales, axis=0, block_size=grid.block))
    return str(b.DequantizeLinear(values, scales, axis=1))
