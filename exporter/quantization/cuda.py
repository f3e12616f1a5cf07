"""Quantised weights in the place of those of a graph, for ONNX Runtime's CUDA kernels.

    MatMul(x, W)        ->  com.microsoft.MatMulNBits(x, q, s, z)
    Gather(W, index)    ->  com.microsoft.GatherBlockQuantized(q, index, s, z), rows of blocks, and
                            a Reshape
    MixtureOfExperts    ->  MatMulNBits for each expert, see ``expert_products``

The kernels of MatMulNBits take 4 and 8 bits, blocks from 16 on, and float32, float16 and bfloat16,
which scales have as well; activations are multiplied as they are. A table has its blocks as a
product reads them, so that a tied output layer reads the same memory: scales and zero points alone
are stored a second time. Tables have 8 bits: of 4 the kernel takes the zero points of all
rows to follow one another, and the CPU's takes those of each row to begin with a byte.

QMoE is not written. Its CUDA kernel takes half precision alone, and weights in an order that an
ONNX Runtime with CUDA writes, where the CPU's takes them as they are: neither proves the other.
Sources: ``contrib_ops/cuda`` of ONNX Runtime, ``quantization`` and ``moe``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from linexport.plugins.ops.body import MICROSOFT, import_microsoft
from linexport.quantization import expert_products
from linexport.quantization.block_quantisation import Quantised
from linexport.quantization.quantisable import Use, Weight
from linexport.quantization.rewrite import (
    WithValues,
    first_columns,
    product,
    replaced_weights,
)

AS_THEY_ARE = 0
"""accuracy_level at which activations keep their type: the kernels know no other."""


def cuda_model(model: onnx.ModelProto, chosen: Mapping[str, WithValues]) -> onnx.ModelProto:
    """Return a copy of the model that reads quantised weights; see ``rewrite.quantised_model``."""
    result = replaced_weights(model, chosen, _replacement, _initializers, _experts)
    import_microsoft(result)
    return result


def _experts(
    node: onnx.NodeProto, up: tuple[Weight, Quantised], down: tuple[Weight, Quantised]
) -> Iterable[onnx.NodeProto]:
    return expert_products.replacement(node, up, down, AS_THEY_ARE)


def _initializers(weight: Weight, quantised: Quantised) -> Iterator[TensorProto]:
    """Yield values (N, blocks, bytes), scales and, where stored, zero points (N, blocks)."""
    if weight.experts:
        yield from expert_products.initializers(weight, quantised)
        return
    first, *others = zip(weight.parts, quantised.packed().values(), strict=False)
    yield numpy_helper.from_array(first[1], first[0])
    for name, array in others:
        if weight.activations:
            yield numpy_helper.from_array(array, name)
        if weight.is_table:
            yield numpy_helper.from_array(array[..., None], _by_block(name))


def _by_block(part: str) -> str:
    """Return the name of scales or zero points (N, blocks, 1)."""
    return f"{part}/by_block"


def _replacement(
    node: onnx.NodeProto, use: Use, weight: Weight, quantised: Quantised
) -> Iterator[onnx.NodeProto]:
    values, scales, zeros = weight.parts
    if not use.is_lookup:
        yield product(node, weight, quantised, values, AS_THEY_ARE)
        return
    grid, output = quantised.grid, node.output[0]
    blocks, sizes, last, shape = (f"{output}/{n}" for n in ("blocks", "sizes", "last", "shape"))
    yield helper.make_node(
        "GatherBlockQuantized",
        [values, node.input[1], _by_block(scales), _by_block(zeros)],
        [blocks],
        node.name,
        domain=MICROSOFT,
        gather_axis=0,
        quantize_axis=2,
        bits=grid.bits,
        block_size=grid.block,
    )
    constant = numpy_helper.from_array(np.asarray([-1], np.int64))
    yield helper.make_node("Constant", [], [last], value=constant)
    yield helper.make_node("Shape", [node.input[1]], [sizes])
    yield helper.make_node("Concat", [sizes, last], [shape], axis=0)
    whole = weight.inputs % grid.block == 0
    rows = output if whole else f"{output}/padded"
    yield helper.make_node("Reshape", [blocks, shape], [rows])
    if not whole:
        yield from first_columns(rows, weight.inputs, output)
