"""Operators that ONNX Runtime 1.31 has no CPU kernels of, as functions of standard ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import onnx
from onnx import helper

from linexport.graph.walk import nodes_within
from linexport.plugins.ops.body import MICROSOFT
from linexport.targets.lowering import gated_delta_net, varlen_conv

DEFINED = "linexport.onnxruntime"
"""Domain of the functions that stand for them."""

OPERATORS: Mapping[str, Callable[[str, str, onnx.NodeProto], onnx.FunctionProto]] = {
    gated_delta_net.OP: gated_delta_net.definition,
    varlen_conv.OP: varlen_conv.definition,
}
"""Writers of the function (domain, name) of a node, by its operator."""


def are_in(model: onnx.ModelProto) -> bool:
    """Return whether a graph or function of a model has such an operator."""
    return next(_calls(model), None) is not None


def defined(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with every such operator a function of standard ones.

    The very model where it has none. Nodes are those that linexport writes.
    """
    if not are_in(model):
        return model
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    functions: dict[tuple[object, ...], onnx.FunctionProto] = {}
    for owner, node in _calls(changed):
        settings = sorted(a.SerializeToString(deterministic=True) for a in node.attribute)
        key = (node.op_type, *settings, *(bool(name) for name in node.input))
        # Names of their own: ONNX Runtime does not see overloads of nodes within functions.
        if key not in functions:
            name = f"{node.op_type}_{len(functions)}"
            functions[key] = OPERATORS[node.op_type](DEFINED, name, node)
        function = functions[key]
        node.domain, node.op_type = function.domain, function.name
        del node.attribute[:]
        if DEFINED not in {o.domain for o in owner.opset_import}:
            owner.opset_import.append(helper.make_opsetid(DEFINED, 1))
    changed.functions.extend(functions.values())
    if DEFINED not in {o.domain for o in changed.opset_import}:
        changed.opset_import.append(helper.make_opsetid(DEFINED, 1))
    return changed


def _calls(
    model: onnx.ModelProto,
) -> Iterator[tuple[onnx.ModelProto | onnx.FunctionProto, onnx.NodeProto]]:
    """Yield every node of such an operator with what declares its domains."""
    owners: list[tuple[onnx.ModelProto | onnx.FunctionProto, Iterator[onnx.NodeProto]]] = [
        (model, nodes_within(model.graph.node)),
        *((f, nodes_within(f.node)) for f in model.functions),
    ]
    for owner, nodes in owners:
        for node in nodes:
            if node.domain == MICROSOFT and node.op_type in OPERATORS:
                yield owner, node
