"""The graph as TensorRT's ONNX parser takes it.

- Sizes and axes that torch computes in the graph become constants: the parser wants them so.
- Decays in two factors are multiplied out in the graph: kernels take one per key channel.
- A node that a plugin runs says so by the attributes ``plugin_namespace`` and ``plugin_version``;
  other runtimes do not read them, and run the node's body.
- TensorRT takes no empty input before one that is given: the place is filled with the node's first
  input, and the attribute ``absent_inputs`` says that it means nothing. A quickly deployable plugin
  has every input of its op.
- A plugin has all its outputs: those nobody reads get names.
- The parser has importers of its own for LinearAttention and CausalConvWithState, and does not ask
  for the domain: what no plugin runs is written out before it parses (``parsable``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import onnx_graphsurgeon as gs
from onnx import helper, inliner

from linexport.plugins.kernels import contract
from linexport.plugins.kernels.description import Description
from linexport.plugins.ops.op import ABSENT, DOMAIN, Node, Op
from linexport.plugins.ops.registry import linexport_nodes
from linexport.plugins.tensorrt import attributes, quick
from linexport.plugins.tensorrt.fields import NAMES

LARGEST_FOLDED = 1 << 20
"""Bytes above which a computed constant is not folded: the file holds the operands already."""


def fold_constants(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with everything computed from constants alone, or from fixed sizes, a constant."""
    graph = gs.import_onnx(model)
    graph.fold_constants(size_threshold=LARGEST_FOLDED)
    graph.cleanup().toposort()
    return gs.export_onnx(graph, do_type_check=False)


def mark_plugins(
    model: onnx.ModelProto,
    describe: Callable[[Op, Node], Description | None],
    filled: bool = True,
) -> onnx.ModelProto:
    """A copy in which the nodes that ``describe`` has a description for are the plugins'.

    Args:
        model: checked, with the shapes and types of values.
        describe: returns what a node's plugin is made of, or None.
        filled: put another tensor in the place of an input that a node lacks, as TensorRT wants.
    """
    marked = onnx.ModelProto()
    marked.CopyFrom(model)
    attributes.allow()
    for node, op, view in list(linexport_nodes(marked)):
        description = describe(op, view)
        if description is None:
            continue
        while not node.input[-1]:
            node.input.pop()
        node.input.extend([""] * (len(description.inputs) - len(node.input)))
        node.output.extend([""] * (len(op.schema.outputs) - len(node.output)))
        for position, output in enumerate(node.output):
            node.output[position] = output or f"{node.name}/unused_{position}"
        absent = [i for i, name in enumerate(node.input) if not name and filled]
        for position in absent:
            node.input[position] = node.input[0]
        if absent:
            node.attribute.append(helper.make_attribute(ABSENT, absent))
        for name, value in plugin_attributes(description).items():
            node.attribute.append(helper.make_attribute(name, value))
    return marked


def plugin_attributes(description: Description) -> dict[str, Any]:
    """Return the attributes by which a node is a plugin's."""
    namespace = quick.NAMESPACE if description.quick else contract.NAMESPACE
    identity = {"plugin_namespace": namespace, "plugin_version": contract.VERSION}
    ahead = {attributes.AHEAD_OF_TIME: 1} if description.quick else {}
    return {**identity, **ahead, **description.attributes()}


def only(model: onnx.ModelProto, sm: int) -> onnx.ModelProto:
    """A copy in which plugins have the kernels of one compute capability only."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in filter(by_plugin, copy.graph.node):
        description = described(node)
        kept = description.only(description.sm_for(sm)).attributes()
        for attribute in node.attribute:
            if attribute.name in NAMES:
                attribute.s = kept[attribute.name].encode()
    return copy


def described(node: onnx.NodeProto) -> Description:
    """The description that a plugin's node carries."""
    return Description.from_attributes(
        {a.name: a.s.decode() for a in node.attribute if a.name in NAMES}
    )


def in_place(model: onnx.ModelProto) -> list[str]:
    """Outputs of nodes that may take the memory of the past they go on from, on every GPU."""
    found = []
    for node in filter(by_plugin, model.graph.node):
        description = described(node)
        able = [set(plan.in_place) for plan in description.plans.values()]
        for tensor, name in zip(description.outputs, node.output, strict=True):
            if all(tensor.name in names for names in able):
                found.append(name)
    return found


def namespaces(model: onnx.ModelProto) -> set[str]:
    """Return the namespaces of the plugins that run nodes of the model."""
    found = (a for n in filter(by_plugin, model.graph.node) for a in n.attribute)
    return {a.s.decode() for a in found if a.name == "plugin_namespace"}


def symbols(model: onnx.ModelProto) -> set[str]:
    """Names of the dynamic dimensions of the inputs."""
    sizes = (d for i in model.graph.input for d in i.type.tensor_type.shape.dim)
    return {d.dim_param for d in sizes if d.dim_param}


def by_plugin(node: onnx.NodeProto) -> bool:
    """The node is one that a plugin runs."""
    return node.domain == DOMAIN and any(a.name == "plugin_namespace" for a in node.attribute)


def parsable(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with bodies of functions in place of their nodes, those of plugins excepted."""
    written_out = onnx.ModelProto()
    written_out.CopyFrom(model)
    kept = {(n.domain, n.op_type, n.overload) for n in model.graph.node if by_plugin(n)}
    # The inliner selects by name, whatever the overload: what it is to inline gets its own.
    for node in written_out.graph.node:
        if node.domain == DOMAIN and not by_plugin(node):
            node.op_type, node.overload = _alone(node.op_type, node.overload), ""
    names = []
    for function in written_out.functions:
        if (function.domain, function.name, function.overload) not in kept:
            function.name, function.overload = _alone(function.name, function.overload), ""
            names.append((function.domain, function.name))
    inlined: onnx.ModelProto = inliner.inline_selected_functions(written_out, names)
    return inlined


def _alone(name: str, overload: str) -> str:
    return f"{name}_{overload}"
