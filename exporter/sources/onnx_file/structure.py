"""Checks of a graph that need none of its weights, made before anything else opens the file.

Names are text and defined once, nodes can be put in order, functions neither call themselves nor
multiply, and external data lie in the model's folder. Both a source that is converted and the model
of an artifact that is loaded pass through here: ONNX Runtime ends the process on a function that
calls itself, an input that a list of inputs lacks or an Einsum of fewer dimensions than its
equation, and expands functions that call each other twice for as long as it takes.

    size(f) = sum over nodes n of f:  1 + size(n) if n calls a function, else 1
"""

from __future__ import annotations

from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import onnx

from linexport.errors import UnsupportedModelError
from linexport.graph.walk import (
    all_nodes,
    all_tensors,
    all_texts,
    nodes_within,
    reads,
)
from linexport.plugins.cpu.library import FUSED_DOMAIN
from linexport.sources.onnx_file.external import check_external
from linexport.sources.onnx_file.ranks import check_ranks

MOST_EXPANDED = 2**16
"""Nodes that calls of functions may add to the graph: 60 layers of a thousand nodes. ONNX Runtime
takes seconds for so many; functions that call each other reach any number from a few lines."""

DEEPEST = 100
"""Calls of functions within each other, as in onnx's checker."""

_LISTED = 4

FunctionKey = tuple[str, str, str]
"""Domain, name and overload."""


def check_structure(path: Path, model: onnx.ModelProto) -> None:
    """Check a graph and put its nodes in order, in place; values of weights are not looked at.

    Args:
        path: the file it was read from, in the folder of its external data.
        model: parsed, with or without the values of its weights.

    Raises:
        UnsupportedModelError: with a phrase that fits after "the model".
    """
    # protobuf gives bytes where text is not UTF-8.
    if not all(isinstance(text, str) for text in all_texts(model)):
        raise UnsupportedModelError("it has names that are not UTF-8 text")
    _check_domains(model)
    _check_names(model.graph)
    _check_variadic(model)
    _sort(model.graph)
    _check_functions(model)
    _check_types(model)
    check_external(path, model)
    check_ranks(path, model)


def _check_domains(model: onnx.ModelProto) -> None:
    """Refuse nodes of the CPU library's own domain, which are written for each other in memory."""
    used = {node.domain for node in all_nodes(model)} | {f.domain for f in model.functions}
    if FUSED_DOMAIN in used:
        raise UnsupportedModelError(
            f"it has nodes of the domain {FUSED_DOMAIN}, which linexport makes when it opens a "
            "model and writes to no file"
        )


def _check_names(graph: onnx.GraphProto) -> None:
    stored = [t.name for t in graph.initializer]
    # Older files list their weights among the inputs as well.
    given = [i.name for i in graph.input if i.name not in set(stored)]
    made = [name for node in graph.node for name in node.output if name]
    twice = _repeated([*stored, *given, *made])
    if twice:
        raise UnsupportedModelError(
            f"{len(twice)} values have a name that is defined twice: {', '.join(twice[:_LISTED])}"
        )


def _check_variadic(model: onnx.ModelProto) -> None:
    """Refuse an empty name among variadic inputs, on which ONNX Runtime's Einsum crashes.

    The specification lets optional inputs alone be left out; onnx's checker looks at single ones.
    """
    for node in all_nodes(model):
        if "" not in node.input or not onnx.defs.has(node.op_type, node.domain):
            continue
        declared = onnx.defs.get_schema(node.op_type, node.domain).inputs
        variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
        if declared and declared[-1].option == variadic and "" in node.input[len(declared) - 1 :]:
            raise UnsupportedModelError(
                f"the {node.op_type} {node.name!r} lacks one of its inputs: "
                f"{', '.join(map(repr, node.input[:_LISTED]))}"
            )


def _check_types(model: onnx.ModelProto) -> None:
    known = set(onnx.TensorProto.DataType.values())
    for tensor in all_tensors(model):
        if tensor.data_type not in known:
            raise UnsupportedModelError(
                f"the constant {tensor.name!r} has the data type {tensor.data_type}, which ONNX "
                "does not have"
            )


def _repeated(names: Iterable[str]) -> list[str]:
    seen: set[str] = set()
    twice: dict[str, None] = {}
    for name in names:
        if name in seen:
            twice[name] = None
        seen.add(name)
    return list(twice)


def _sort(graph: onnx.GraphProto) -> None:
    """Put nodes in an order in which each follows what it reads; some tools write another."""
    producers = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    after = {
        i: {producers[name] for name in reads(node) if name in producers}
        for i, node in enumerate(graph.node)
    }
    if all(before < i for i, others in after.items() for before in others):
        return
    try:
        order = list(TopologicalSorter(after).static_order())
    except CycleError as error:
        circle = [graph.node[i].name or graph.node[i].op_type for i in error.args[1]]
        raise UnsupportedModelError(
            f"its nodes form a cycle: {' -> '.join(circle[: _LISTED + 1])}"
        ) from error
    nodes = [onnx.NodeProto.FromString(graph.node[i].SerializeToString()) for i in order]
    del graph.node[:]
    graph.node.extend(nodes)


def _check_functions(model: onnx.ModelProto) -> None:
    bodies = {
        (f.domain, f.name, f.overload): [_called(n) for n in nodes_within(f.node)]
        for f in model.functions
    }
    if len(bodies) != len(model.functions):
        raise UnsupportedModelError("it has two functions of the same domain and name")
    sizes: dict[FunctionKey, int] = {}
    depths: dict[FunctionKey, int] = {}
    for function in _callees_first(bodies):
        calls = [callee for callee in bodies[function] if callee in sizes]
        sizes[function] = len(bodies[function]) + sum(sizes[callee] for callee in calls)
        depths[function] = 1 + max((depths[callee] for callee in calls), default=0)
    deepest = max(depths.values(), default=0)
    if deepest > DEEPEST:
        raise UnsupportedModelError(
            f"its functions call each other {deepest} deep; at most {DEEPEST} are read"
        )
    added = sum(sizes.get(_called(node), 0) for node in nodes_within(model.graph.node))
    if added > MOST_EXPANDED:
        raise UnsupportedModelError(
            f"its functions expand to {added} nodes; at most {MOST_EXPANDED} are read"
        )


def _called(node: onnx.NodeProto) -> FunctionKey:
    return node.domain, node.op_type, node.overload


def _callees_first(bodies: dict[FunctionKey, list[FunctionKey]]) -> list[FunctionKey]:
    """Order functions so that each follows those it calls.

    Raises:
        UnsupportedModelError: they call each other in a circle.
    """
    calls = {function: {c for c in body if c in bodies} for function, body in bodies.items()}
    try:
        return list(TopologicalSorter(calls).static_order())
    except CycleError as error:
        circle = [name for _, name, _ in error.args[1]]
        raise UnsupportedModelError(
            f"its functions call each other in a circle: {' -> '.join(circle[: _LISTED + 1])}"
        ) from error
