"""Quantised weights in the place of those of a graph, in standard operators of opset 21.

    MatMul(x, W)        ->  MatMul(x, DequantizeLinear(q, s[, z], axis=0, block_size=32))
    Gather(W, index)    ->  DequantizeLinear(q[index], s[index], z[index])

q is (K, N), with scales and zero points (blocks, N). A table is stored so as well and looked up
along its second axis, so that an output layer tied to it is a product like any other. Four bits
without zero points are INT4, others UINT4 and UINT8.

ONNX Runtime makes ``MatMulNBits`` of every such product when it opens the model, with activations
rounded to int8 unless its option ``session.qdq_matmulnbits_accuracy_level`` says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from linexport.errors import UnsupportedModelError
from linexport.quantization.block_quantisation import Quantised
from linexport.quantization.quantisable import Use, Weight
from linexport.quantization.rewrite import WithValues, replaced_weights

OPSET = 21
"""The first whose DequantizeLinear has blocks, and with types of four bits."""

CHANGED = "GroupNormalization"
"""The operator that opset 21 gave another meaning."""


def portable_model(model: onnx.ModelProto, chosen: Mapping[str, WithValues]) -> onnx.ModelProto:
    """Return a copy of the model that reads quantised weights; see ``rewrite.quantised_model``.

    Raises:
        UnsupportedModelError: it cannot be of opset 21.
    """
    result = replaced_weights(model, chosen, _replacement, _initializers)
    raise_opset(result)
    return result


def raise_opset(model: onnx.ModelProto) -> None:
    """Have a model, in place, be of an opset with blocks.

    Raises:
        UnsupportedModelError: it cannot be.
    """
    for imports in (model.opset_import, *(f.opset_import for f in model.functions)):
        for opset in imports:
            if opset.domain in ("", "ai.onnx") and opset.version < OPSET:
                _check(model)
                opset.version = OPSET
    model.ir_version = max(model.ir_version, 10)


def _check(model: onnx.ModelProto) -> None:
    for nodes in (model.graph.node, *(f.node for f in model.functions)):
        if any(node.op_type == CHANGED and not node.domain for node in nodes):
            raise UnsupportedModelError(
                f"The model has {CHANGED} of an opset below {OPSET}, where it means something "
                f"else, and integer weights need {OPSET}. Convert it with --target ort."
            )


def _initializers(weight: Weight, quantised: Quantised) -> Iterator[onnx.TensorProto]:
    """Yield values (K, N), scales and, where they are stored, zero points (blocks, N)."""
    grid = quantised.grid
    values, zeros = quantised.values.reshape(len(quantised.values), -1), quantised.zeros
    arrays: list[NDArray] = [values[:, : weight.inputs], quantised.scales, zeros]
    if grid.symmetric:
        arrays = [arrays[0].astype(np.int8) - np.int8(grid.middle), quantised.scales]
    kind = np.dtype(np.uint8)
    if grid.bits == 4:
        kind = np.dtype(ml_dtypes.int4 if grid.symmetric else ml_dtypes.uint4)
    for name, array, is_scale in zip(weight.parts, arrays, (False, True, False), strict=False):
        stored = np.ascontiguousarray(array.T)
        yield numpy_helper.from_array(stored if is_scale else stored.astype(kind), name)


def _replacement(
    node: onnx.NodeProto, use: Use, weight: Weight, quantised: Quantised
) -> Iterator[onnx.NodeProto]:
    parts = [*weight.parts[:2], *([] if quantised.grid.symmetric else weight.parts[2:])]
    block, output = quantised.grid.block, node.output[0]
    if not use.is_lookup:
        matrix = f"{output}/matrix"
        if weight.is_table:
            # Computed when the model is opened: ONNX Runtime joins no weights that others read.
            own = [f"{output}/{part.rpartition('/')[2]}" for part in parts]
            yield _constant(f"{output}/same", [0, 0])
            for part, name in zip(parts, own, strict=True):
                yield helper.make_node("Reshape", [part, f"{output}/same"], [name])
            parts = own
        yield _dequantised(parts, matrix, axis=0, block=block)
        yield helper.make_node("MatMul", [node.input[0], matrix], [output], node.name)
        return
    rows = [f"{output}/{part.rpartition('/')[2]}" for part in parts]
    for part, row in zip(parts, rows, strict=True):
        yield helper.make_node("Gather", [part, node.input[1]], [row], axis=1)
    # (blocks or values, ...) of every index: the blocks are along the first axis.
    flat = f"{output}/first"
    yield _dequantised(rows, flat, axis=0, block=block)
    yield helper.make_node("Shape", [node.input[1]], [f"{output}/sizes"])
    yield _constant(f"{output}/width", [-1])
    yield helper.make_node("Flatten", [flat], [f"{output}/flat"], axis=1)
    yield helper.make_node("Transpose", [f"{output}/flat"], [f"{output}/rows"], perm=[1, 0])
    yield helper.make_node(
        "Concat", [f"{output}/sizes", f"{output}/width"], [f"{output}/shape"], axis=0
    )
    yield helper.make_node("Reshape", [f"{output}/rows", f"{output}/shape"], [output], node.name)


def _dequantised(parts: list[str], output: str, axis: int, block: int) -> onnx.NodeProto:
    return helper.make_node("DequantizeLinear", parts, [output], axis=axis, block_size=block)


def _constant(name: str, values: list[int]) -> onnx.NodeProto:
    array = np.asarray(values, np.int64)
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array))
