"""Quantised weights in the place of those of a graph.

    MatMul(x, W)       ->  com.microsoft.MatMulNBits(x, q, s, z), of a Gemm with an Add
    Gather(W, index)   ->  com.microsoft.GatherBlockQuantized(q, index, s, z), and a Slice where no
                           block divides the width
    MixtureOfExperts   ->  com.microsoft.QMoE, see ``experts``, or MatMulNBits for each expert, see
                           ``expert_products``

A weight with both uses is stored once: the product reads the table through a Reshape, which ONNX
Runtime computes when it opens the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from linexport.plugins.ops.body import MICROSOFT, import_microsoft
from linexport.quantization import expert_products, experts
from linexport.quantization.block_quantisation import Quantised
from linexport.quantization.input_order import InputOrders
from linexport.quantization.quantisable import Use, Weight
from linexport.targets.runtime.options import FLOAT_ACTIVATIONS, INTEGER_ACTIVATIONS


class WithValues(Protocol):
    """A weight and its quantised values."""

    @property
    def weight(self) -> Weight:
        """The weight."""
        ...

    @property
    def quantised(self) -> Quantised:
        """Its values."""
        ...


def quantised_model(
    model: onnx.ModelProto,
    chosen: Mapping[str, WithValues],
) -> onnx.ModelProto:
    """Return a copy of the model that reads quantised weights.

    Args:
        model: not changed; may lack the values of its initializers.
        chosen: weights with their quantised values, by initializer.
    """
    result = replaced_weights(model, chosen, _replacement, _initializers, _experts)
    import_microsoft(result)
    return result


ReplaceExperts = Callable[
    [onnx.NodeProto, tuple[Weight, Quantised], tuple[Weight, Quantised]], Iterable[onnx.NodeProto]
]
"""Gives nodes in the place of one of experts, whose weights up and down these are."""


def replaced_weights(
    model: onnx.ModelProto,
    chosen: Mapping[str, WithValues],
    replacement: Callable[[onnx.NodeProto, Use, Weight, Quantised], Iterable[onnx.NodeProto]],
    initializers: Callable[[Weight, Quantised], Iterable[TensorProto]],
    replace_experts: ReplaceExperts | None = None,
) -> onnx.ModelProto:
    """Return a copy of the model with other nodes and initializers for some weights.

    Args:
        model: not changed; may lack the values of its initializers.
        chosen: weights with their quantised values, by initializer.
        replacement: gives the nodes in the place of one that reads a weight.
        initializers: gives what is stored of a weight.
        replace_experts: gives them in the place of one of experts; None: no weights of theirs are
            chosen.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    orders = InputOrders()
    by_node: dict[int, list[tuple[Use, WithValues]]] = {}
    for made in chosen.values():
        for use in made.weight.uses:
            by_node.setdefault(use.node, []).append((use, made))
    nodes: list[onnx.NodeProto] = []
    for index, node in enumerate(model.graph.node):
        read = by_node.get(index)
        if read is None:
            nodes.append(node)
        elif len(read) == 1:
            [(use, made)] = read
            order = made.quantised.order
            *gathers, ordered = [node] if order is None else orders.nodes(node, order)
            product, bias = _without_bias(ordered)
            nodes.extend(gathers)
            nodes.extend(replacement(product, use, made.weight, made.quantised))
            nodes.extend(bias)
        else:
            assert replace_experts is not None
            up, down = ((made.weight, made.quantised) for _, made in read)
            nodes.extend(replace_experts(node, up, down))
    gone = {use.weight for made in chosen.values() for use in made.weight.uses}
    dead = {n.output[0] for n in nodes if n.op_type == "Transpose" and n.input[0] in gone}
    del result.graph.node[:]
    result.graph.node.extend(n for n in nodes if not set(n.output) & dead)
    left = [t for t in model.graph.initializer if t.name not in gone]
    del result.graph.initializer[:]
    result.graph.initializer.extend(left)
    for made in chosen.values():
        result.graph.initializer.extend(initializers(made.weight, made.quantised))
    result.graph.initializer.extend(orders.initializers())
    return result


def _without_bias(node: onnx.NodeProto) -> tuple[onnx.NodeProto, list[onnx.NodeProto]]:
    """Return a Gemm as a product, and what adds its bias; other nodes as they are."""
    if node.op_type != "Gemm" or len(node.input) < 3 or not node.input[2]:
        return node, []
    product = onnx.NodeProto()
    product.CopyFrom(node)
    product.output[0] = f"{node.output[0]}/product"
    added = [product.output[0], node.input[2]]
    return product, [helper.make_node("Add", added, list(node.output))]


def float_activations(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a quantised model that multiplies float32 activations."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    shapes = {t.name: tuple(t.dims) for t in model.graph.initializer}
    del result.graph.node[:]
    for original in model.graph.node:
        node = onnx.NodeProto()
        node.CopyFrom(original)
        for attribute in node.attribute:
            if node.domain == MICROSOFT and attribute.name == "accuracy_level":
                attribute.i = FLOAT_ACTIVATIONS
        own = experts.in_float32(node, shapes) if experts.needs_int8(node) else [node]
        result.graph.node.extend(own)
    return result


def _initializers(weight: Weight, quantised: Quantised) -> Iterator[TensorProto]:
    """Yield values, scales and, where they are stored, zero points.

    Values are (N, blocks, bytes), those of a table (N, bytes), those of experts (E, F, bytes).
    """
    if weight.experts and not weight.experts.fused:
        yield from expert_products.initializers(weight, quantised)
        return
    arrays = quantised.packed()
    if weight.is_table or weight.experts:
        arrays["values"] = arrays["values"].reshape(weight.outputs, -1)
    for name, array in zip(weight.parts, arrays.values(), strict=False):
        ordered = experts.by_expert(array, weight.experts) if weight.experts else array
        yield numpy_helper.from_array(ordered, name)


def _experts(
    node: onnx.NodeProto, up: tuple[Weight, Quantised], down: tuple[Weight, Quantised]
) -> Iterable[onnx.NodeProto]:
    fused = up[0].experts is not None and up[0].experts.fused
    write = experts.replacement if fused else expert_products.replacement
    return write(node, up, down, INTEGER_ACTIVATIONS)


def _replacement(
    node: onnx.NodeProto, use: Use, weight: Weight, quantised: Quantised
) -> Iterator[onnx.NodeProto]:
    values, scales, zeros = weight.parts
    bits, block = quantised.grid.bits, quantised.grid.block
    if use.is_lookup:
        looked_up = list(node.output)
        if weight.inputs % block:
            looked_up = [f"{node.output[0]}/padded"]
        yield helper.make_node(
            "GatherBlockQuantized",
            [values, node.input[1], scales, zeros],
            looked_up,
            node.name,
            domain=MICROSOFT,
            gather_axis=0,
            quantize_axis=1,
            bits=bits,
            block_size=block,
        )
        if weight.inputs % block:  # rows are stored in whole blocks
            yield from first_columns(looked_up[0], weight.inputs, node.output[0])
        return
    if weight.is_table:
        shape, blocks = f"{node.output[0]}/shape", f"{node.output[0]}/blocks"
        sizes = np.asarray([weight.outputs, quantised.zeros.shape[1], -1], np.int64)
        yield helper.make_node("Constant", [], [shape], value=numpy_helper.from_array(sizes))
        yield helper.make_node("Reshape", [values, shape], [blocks])
        values = blocks
    yield product(node, weight, quantised, values, INTEGER_ACTIVATIONS)


def product(
    node: onnx.NodeProto, weight: Weight, quantised: Quantised, values: str, level: int
) -> onnx.NodeProto:
    """Return the node in the place of a product.

    Args:
        node: the product.
        weight: that it reads.
        quantised: its values.
        values: name of those, (N, blocks, bytes).
        level: ``accuracy_level``.
    """
    _, scales, zeros = weight.parts
    return helper.make_node(
        "MatMulNBits",
        [node.input[0], values, scales, *([] if quantised.grid.symmetric else [zeros])],
        node.output,
        node.name,
        domain=MICROSOFT,
        K=weight.inputs,
        N=weight.outputs,
        accuracy_level=level,
        bits=quantised.grid.bits,
        block_size=quantised.grid.block,
    )


def first_columns(padded: str, width: int, output: str) -> Iterator[onnx.NodeProto]:
    """Yield nodes that take the first ``width`` elements of the last axis."""
    bounds = {f"{output}/first": 0, f"{output}/width": width, f"{output}/axis": -1}
    for name, value in bounds.items():
        constant = numpy_helper.from_array(np.asarray([value], np.int64))
        yield helper.make_node("Constant", [], [name], value=constant)
    yield helper.make_node("Slice", [padded, *bounds], [output])
