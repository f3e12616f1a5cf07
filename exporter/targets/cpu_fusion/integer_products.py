"""Products with weights of four and eight bits by the CPU library, which multiplies integers.

    com.microsoft.MatMulNBits, accuracy_level 4  ->  linexport.cpu.MatMulNBits

Both round activations to int8 for each token and block. The library reads weights as they lie in
the file: a session packs no copy of them, and a table that is looked up too has no second form.
"""

from __future__ import annotations

import logging

import onnx
from onnx import TensorProto, helper

from linexport.plugins.cpu import library
from linexport.plugins.cpu.library import FUSED_DOMAIN
from linexport.plugins.ops.body import MICROSOFT
from linexport.targets.cpu_fusion.groups import add_functions, drop_unused
from linexport.targets.cpu_fusion.nodes import attributes
from linexport.targets.runtime.options import INTEGER_ACTIVATIONS

log = logging.getLogger(__name__)

OP = "MatMulNBits"

BITS = (4, 8)
BLOCKS = (16, 32, 64, 128, 256)

WEIGHTS, SCALES, ZERO_POINTS, ORDER, BIAS = 1, 2, 3, 4, 5
"""Places of the inputs of ONNX Runtime's operator; ``ORDER`` are blocks of inputs, by input."""

SETTINGS = ("K", "N", "bits", "block_size")


def with_integer_products(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the library's products, itself where it has none or cannot run them.

    Args:
        model: products whose scales are not float32 are left, and those in loops.
    """
    if not library.multiplies_integers():
        return model
    graph = model.graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    found = {i for i, node in enumerate(graph.node) if _fits(node, types)}
    if not found:
        return model
    log.info("%d products are of integers, by the CPU library", len(found))
    views = {
        node.output[0]: node.input[0]
        for node in graph.node
        if (node.domain, node.op_type) == ("", "Reshape") and node.input[0] in types
    }
    made = onnx.ModelProto()
    made.CopyFrom(model)
    nodes = [_replacement(n, views) if i in found else n for i, n in enumerate(graph.node)]
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    drop_unused(made.graph)
    add_functions(made, (), FUSED_DOMAIN)
    return made


def _fits(node: onnx.NodeProto, types: dict[str, int]) -> bool:
    """Return whether the library computes a node."""
    if (node.domain, node.op_type) != (MICROSOFT, OP):
        return False
    settings = attributes(node)
    scales, zeros = node.input[SCALES], _input(node, ZERO_POINTS)
    return (
        settings.get("accuracy_level") == INTEGER_ACTIVATIONS
        and settings.get("bits", BITS[0]) in BITS
        and settings["block_size"] in BLOCKS
        and types.get(scales) == TensorProto.FLOAT
        and (not zeros or types.get(zeros) == TensorProto.UINT8)
        and not _input(node, ORDER)
    )


def _input(node: onnx.NodeProto, place: int) -> str:
    return node.input[place] if place < len(node.input) else ""


def _replacement(node: onnx.NodeProto, views: dict[str, str]) -> onnx.NodeProto:
    """Return the library's node; a table is read as it is stored."""
    x, weights, scales = node.input[: SCALES + 1]
    others = [_input(node, ZERO_POINTS), _input(node, BIAS)]
    settings = {key: value for key, value in attributes(node).items() if key in SETTINGS}
    inputs = [x, views.get(weights, weights), scales, *others]
    return helper.make_node(OP, inputs, node.output, node.name, domain=FUSED_DOMAIN, **settings)
