"""Quantised weights in the place of those of a graph, as engines of TensorRT keep them packed.

    MatMul(x, W)        ->  MatMul(x, DequantizeLinear(q, s))        q (K, N)
    Gather(W, index)    ->  DequantizeLinear(q, 1)[:, index]^T s[index]
    MixtureOfExperts    ->  two products, see ``engine_experts``

q is INT4 in blocks of 32 inputs with scales (blocks, N), or INT8 or FP8 with one scale an output,
(N,). Scales are positive, of the type of the graph, and there are no zero points.

That is what the builder of TensorRT-RTX 1.7.1 makes one layer of, for 8.6 to 12.0. INT8 and FP8 in
blocks it computes as a whole matrix in every call, before the product, and so it does with one
scale an output where the product has exactly one row (``profiles.with_pairs`` gives it two). It
takes quantised constants into a DequantizeLinear alone, and reads rows of one without computing the
others only where no product reads that DequantizeLinear: hence the second one, by 1, of the same
constant, whose scales are looked up in their own Gather. See ``joint_products`` as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np
import onnx
from onnx import numpy_helper

from linexport.plugins.ops.body import Body
from linexport.quantization import engine_experts
from linexport.quantization.block_quantisation import E4M3, SCALE_TYPES, Grid, Quantised
from linexport.quantization.experts import inlined
from linexport.quantization.joint_products import join_products
from linexport.quantization.portable import raise_opset
from linexport.quantization.quantisable import BLOCK, Use, Weight
from linexport.quantization.rewrite import WithValues, replaced_weights


def grid(weight: Weight, bits: int, scales: str) -> Grid:
    """Return the numbers that engines have: blocks for 4 bits, else one scale an output.

    Weights that no block divides, or that are a single one, have 8 bits.
    """
    if bits == 4 and weight.inputs % BLOCK == 0 and weight.inputs > BLOCK:
        return Grid(4, BLOCK, symmetric=True, scales=scales, positive=True)
    return Grid(8, weight.inputs, symmetric=True, scales=scales, positive=True)


def floats(weight: Weight, bits: int, scales: str) -> Grid:
    """Return floats of 8 bits with one scale an output."""
    return Grid(bits, weight.inputs, symmetric=True, scales=scales, positive=True, floating=True)


def engine_model(model: onnx.ModelProto, chosen: Mapping[str, WithValues]) -> onnx.ModelProto:
    """Return a copy of the model that reads quantised weights; see ``rewrite.quantised_model``.

    Raises:
        UnsupportedModelError: it cannot be of opset 21.
    """
    result = replaced_weights(
        model, chosen, _replacement, _initializers, engine_experts.replacement
    )
    raise_opset(result)
    join_products(result)
    return result


def _one(weight: Weight) -> str:
    return f"{weight.name}/one"


def _initializers(weight: Weight, quantised: Quantised) -> Iterator[onnx.TensorProto]:
    """Yield values (K, N), and scales (blocks, N) or (N,)."""
    own, (values, scales, _) = quantised.grid, weight.parts
    stored = quantised.values.reshape(len(quantised.values), -1)[:, : weight.inputs]
    if own.floating:
        typed = stored.view(E4M3)
    else:
        kind = np.dtype(ml_dtypes.int4 if own.bits == 4 else np.int8)
        typed = (stored.astype(np.int16) - own.middle).astype(np.int8).astype(kind)
    yield numpy_helper.from_array(np.ascontiguousarray(typed.T), values)
    kind = SCALE_TYPES[own.scales]
    steps = np.ascontiguousarray(quantised.scales.T.astype(kind))
    yield numpy_helper.from_array(steps if own.bits == 4 else steps[0], scales)
    if weight.is_table:
        yield numpy_helper.from_array(np.ones((), kind), _one(weight))


def _replacement(
    node: onnx.NodeProto, use: Use, weight: Weight, quantised: Quantised
) -> Iterator[onnx.NodeProto]:
    (values, scales, _), output = weight.parts, node.output[0]
    if use.is_lookup:
        yield from _looked_up(values, scales, _one(weight), node)
        return
    b = Body()
    product = b.MatMul(node.input[0], engine_experts.dequantised(b, weight, quantised))
    yield from inlined(b, product, output, "packed")


def _looked_up(
    values: str, scales: str, one: str, node: onnx.NodeProto
) -> Iterator[onnx.NodeProto]:
    b, index = Body(), node.input[1]
    columns = b.Gather(b.DequantizeLinear(values, one), index, axis=1)
    scaled = b.Mul(columns, b.Gather(scales, index))
    rows = b.Transpose(b.Flatten(scaled, axis=1), perm=[1, 0])
    shape = b.Concat(b.Shape(index), b.const([-1]), axis=0)
    yield from inlined(b, b.Reshape(rows, shape), node.output[0], "looked_up")
