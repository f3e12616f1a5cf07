"""Nodes of the CPU library that lead to each other, as one node.

    Tokenwise, CausalConvTokens, Tokenwise, LinearAttention, Tokenwise  ->  linexport.cpu.Chain

Between two products of a layer, where most of them compute next to nothing for one token, and ONNX
Runtime takes microseconds for each.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx
from onnx import AttributeProto, TensorProto, helper

from linexport.graph.walk import reads
from linexport.plugins.cpu import library
from linexport.plugins.ops import op
from linexport.plugins.ops.op import name_overload
from linexport.plugins.ops.registry import all_ops
from linexport.targets.cpu_fusion import DOMAIN, MAX_TENSORS
from linexport.targets.cpu_fusion import OP as PROGRAM
from linexport.targets.cpu_fusion.cached_attention import CACHED, MASK
from linexport.targets.cpu_fusion.cached_attention import OP as CACHED_ATTENTION
from linexport.targets.cpu_fusion.convolutions import OP as CONVOLUTION
from linexport.targets.cpu_fusion.exponentials import OP as EXPONENTIALS
from linexport.targets.cpu_fusion.exponentials import inlined
from linexport.targets.cpu_fusion.groups import (
    Group,
    add_functions,
    connected,
    ordered,
    outputs_of,
    readers_of,
)
from linexport.targets.cpu_fusion.nodes import attributes

log = logging.getLogger(__name__)

OP = "Chain"

MOST_PLACES = 64
"""Values of a chain that the library's operator has places for."""

TYPES = {"tensor(bool)": TensorProto.BOOL, "tensor(int64)": TensorProto.INT64}
"""Types of an op's inputs that are not activations."""

FUSED = {PROGRAM: (), CONVOLUTION: (), EXPONENTIALS: (6,), CACHED_ATTENTION: ()}
"""Ops made of several nodes, with those of their inputs that are conditions: others are float32."""

SETTINGS = (AttributeProto.INT, AttributeProto.FLOAT, AttributeProto.STRING)
"""Types of attributes that the library reads."""

Functions = Mapping[tuple[str, str, str], onnx.FunctionProto]


def with_chains(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with one node in the place of nodes of the library that lead to each other.

    Args:
        model: what ``with_programs`` made.
    """
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    readers = readers_of(model.graph)
    replaced: dict[int, onnx.NodeProto] = {}
    gone: set[int] = set()
    known: dict[str, onnx.FunctionProto] = {}
    for group in _groups(model, functions):
        nodes = [model.graph.node[index] for index in group]
        inputs = list(dict.fromkeys(n for node in nodes for n in node.input if n))
        own = {n for node in nodes for n in node.output if n}
        inputs = [name for name in inputs if name not in own]
        outputs = outputs_of(model.graph, group, readers)
        wide = max(len(inputs), len(outputs)) > MAX_TENSORS or len(own) + len(inputs) > MOST_PLACES
        if wide or not _agree(nodes, functions):
            continue
        settings = _settings(nodes, inputs, outputs)
        alike = repr((settings, [node.overload for node in nodes]))
        if alike not in known:
            known[alike] = _function(nodes, functions, inputs, outputs, settings)
        replaced[group[-1]] = helper.make_node(
            OP,
            inputs,
            outputs,
            f"{nodes[-1].name}/chain",
            domain=DOMAIN,
            overload=known[alike].overload,
            **settings,
        )
        gone |= set(group)
    if not replaced:
        return model
    log.info("%d nodes of the CPU library are %d chains", len(gone), len(replaced))
    made = onnx.ModelProto()
    made.CopyFrom(model)
    kept = enumerate(model.graph.node)
    nodes = [replaced.get(i, node) for i, node in kept if i not in gone or i in replaced]
    del made.graph.node[:]
    made.graph.node.extend(ordered(nodes))
    add_functions(made, {f.overload: f for f in known.values()}.values(), DOMAIN)
    return made


def _groups(model: onnx.ModelProto, functions: Functions) -> list[Group]:
    """Return connected nodes of the library; no way leads out of such a group and back in."""
    types = {t.name: t.data_type for t in model.graph.initializer}
    for value in (*model.graph.value_info, *model.graph.input, *model.graph.output):
        types[value.name] = value.type.tensor_type.elem_type

    def given_to_step(node: onnx.NodeProto) -> Sequence[str] | None:
        expected = _input_types(node)
        if (node.domain, node.op_type, node.overload) not in functions or expected is None:
            return None
        if any(a.type not in SETTINGS for a in node.attribute):
            return None
        given = zip(node.input, expected, strict=False)
        if any(name and types.get(name) != kind for name, kind in given):
            return None
        types.update(dict.fromkeys(filter(None, node.output), TensorProto.FLOAT))
        return [*reads(node)]

    return [group for group in connected(model.graph, given_to_step) if len(group) > 1]


def _input_types(node: onnx.NodeProto) -> list[int] | None:
    """Return the types that the library has of a node's inputs, None where it is not one of its."""
    if node.domain == DOMAIN and node.op_type in FUSED:
        others = dict.fromkeys(FUSED[node.op_type], TensorProto.BOOL)
        if "low" in attributes(node):  # which keys are seen
            others[MASK] = TensorProto.INT64
        if node.op_type == CACHED_ATTENTION:
            others[CACHED] = TensorProto.INT64
        return [others.get(i, TensorProto.FLOAT) for i in range(len(node.input))]
    if node.domain != op.DOMAIN or node.op_type not in library.OPS:
        return None
    formal = all_ops()[node.op_type].schema.inputs
    if len(node.input) > len(formal):
        return None
    return [TYPES.get(one.type_str, TensorProto.FLOAT) for one in formal]


def _agree(nodes: Sequence[onnx.NodeProto], functions: Functions) -> bool:
    """Return whether the nodes' functions are of the same operator sets."""
    own = [functions[node.domain, node.op_type, node.overload] for node in nodes]
    opsets = {(o.domain, o.version) for f in own for o in f.opset_import}
    return len(dict(opsets)) == len(opsets)


def _settings(
    nodes: Sequence[onnx.NodeProto], inputs: Sequence[str], outputs: Sequence[str]
) -> dict[str, Any]:
    """Return the attributes of the node in the place of these: its steps, and theirs."""
    places = {name: i for i, name in enumerate([*inputs, *outputs])}
    words: list[object] = [len(inputs), len(outputs), len(nodes)]
    found: dict[str, object] = {}
    for i, node in enumerate(nodes):
        words += [node.op_type, len(node.input)]
        words += [places[name] if name else -1 for name in node.input]
        words.append(len(node.output))
        words += [places.setdefault(name, len(places)) if name else -1 for name in node.output]
        found |= {f"step{i}_{name}": value for name, value in attributes(node).items()}
    return found | {"steps": " ".join(map(str, words))}


def _function(
    nodes: Sequence[onnx.NodeProto],
    functions: Functions,
    inputs: Sequence[str],
    outputs: Sequence[str],
    settings: Iterable[str],
) -> onnx.FunctionProto:
    """Return the nodes' own functions as one; ``settings``: names of its attributes."""
    names = {name: f"x{i}" for i, name in enumerate(inputs)}
    names |= {name: f"y{i}" for i, name in enumerate(outputs)}
    given, made = [names[name] for name in inputs], [names[name] for name in outputs]
    body, opsets = inlined(nodes, [*functions.values()], names)
    function = helper.make_function(DOMAIN, OP, given, made, body, opsets, [*settings])
    name_overload(function)
    return function
