"""Caches of keys and values with memory for more tokens than they hold, to which calls append.

    past_key (B, H, P, d)         ->  past_key (B, H, C, d), and cached_tokens = [P]
    present_key (B, H, P + T, d)  ->  present_key (B, H, C, d), of which P + T tokens are held

A session gives both the same memory: a call then writes its own T tokens, and the P before them
are not copied. This is made of a model when it is opened, as its programs are; its file, and what
a caller gives and gets, do not change. See ``targets.runtime.appended_caches``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from linexport.plugins.ops.op import name_overload
from linexport.plugins.ops.registry import known_shapes
from linexport.plugins.ops.shapes import Dim
from linexport.targets.cpu_fusion.cached_attention import OP, PASTS, PRESENTS
from linexport.targets.cpu_fusion.groups import add_functions, readers_of
from linexport.targets.cpu_fusion.lookup import terms
from linexport.targets.cpu_fusion.nodes import attributes

CACHED_TOKENS = "cached_tokens"
"""Input of the graph that is run: (1,) int64, the tokens that caches hold before the call."""

CAPACITY = "capacity"
"""Name of an axis of a cache: the tokens that it has memory for."""

AXIS = 2
"""The axis of the tokens in a cache."""


@dataclass(frozen=True)
class Caches:
    """The caches of a model that calls may append to.

    Attributes:
        presents: the output of each cache by its input.
        added: an input, and its axis that is as long as what a call adds.
    """

    presents: Mapping[str, str]
    added: tuple[str, int]


def find_caches(model: onnx.ModelProto) -> Caches | None:
    """Return the caches of a model, None where calls cannot append to all of them.

    A cache is an input and an output that one ``CachedAttention`` alone reads and writes. Nodes
    that read the size of one may be there.
    """
    graph, shapes, readers = model.graph, known_shapes(model), readers_of(model.graph)
    attending = [i for i, node in enumerate(graph.node) if node.op_type == OP]
    presents: dict[str, str] = {}
    for index in attending:
        node = graph.node[index]
        presents |= zip(node.input[PASTS], node.output[PRESENTS], strict=True)
    data = {i.name for i in graph.input} - {t.name for t in graph.initializer}
    shown = {o.name for o in graph.output}
    for past, present in presents.items():
        reading = [i for i in readers[past] if i < 0 or graph.node[i].op_type != "Shape"]
        if past not in data or present not in shown or len(reading) != 1 or reading[0] < 0:
            return None
        if readers[present] != [-1]:
            return None
    added = {_added(shapes[past][AXIS], shapes[q][AXIS]) for past, q in presents.items()}
    place = next(
        (
            (i.name, shapes[i.name].index(size))
            for size in added
            for i in graph.input
            if i.name in data and i.name not in presents and size in shapes[i.name]
        ),
        None,
    )
    if len(added) != 1 or len(presents) != 2 * len(attending) or place is None:
        return None
    return Caches(presents, place)


def _added(held: Dim, after: Dim) -> Dim:
    """Return the size that is added to that of the past, None where it is not one name."""
    rest = terms(after)
    if str(held) in rest:
        rest.remove(str(held))
    return rest[0] if len(rest) == 1 and isinstance(held, str) else None


def with_capacity(model: onnx.ModelProto, caches: Caches) -> onnx.ModelProto:
    """Return the model with caches that have memory for more tokens than they hold."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    functions = {(f.domain, f.name, f.overload): f for f in made.functions}
    appending: dict[str, onnx.FunctionProto] = {}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type == "Shape" and node.input[0] in caches.presents:
            nodes += _sizes(node)
            continue
        if node.op_type == OP:
            function = _appending(functions[node.domain, node.op_type, node.overload])
            appending[function.overload] = function
            node.input.append(CACHED_TOKENS)
            node.overload = function.overload
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    graph.input.append(helper.make_tensor_value_info(CACHED_TOKENS, TensorProto.INT64, [1]))
    for value in (*graph.input, *graph.output):
        if value.name in {*caches.presents, *caches.presents.values()}:
            value.type.tensor_type.shape.dim[AXIS].dim_param = CAPACITY
    for function in appending.values():
        add_functions(made, [function], function.domain)
    return made


def _sizes(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """Yield nodes that give the sizes of a cache that is as long as what it holds."""
    start, end, _ = slice(*map(attributes(node).get, ("start", "end"))).indices(4)
    parts: list[str] = []
    for first, last in ((start, min(end, AXIS)), (max(start, AXIS + 1), end)):
        if first == AXIS + 1 and start <= AXIS < end:
            parts.append(CACHED_TOKENS)
        if first < last:
            parts.append(f"{node.output[0]}/from_{first}")
            yield helper.make_node("Shape", node.input, parts[-1:], start=first, end=last)
    yield helper.make_node("Concat", parts, node.output, node.name, axis=0)


def _appending(function: onnx.FunctionProto) -> onnx.FunctionProto:
    """Return what a node computes of a cache that holds less than it has memory for."""
    made = onnx.FunctionProto()
    made.CopyFrom(function)
    constants = {"tokens_axis": AXIS, "no_tokens": 0, "end_of_axis": np.iinfo(np.int64).max}
    first = [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array([number])))
        for name, number in constants.items()
    ]
    last: list[onnx.NodeProto] = []
    inner: dict[str, str] = {}
    for past, present in zip(function.input[PASTS], function.output[PRESENTS], strict=True):
        inner |= {past: f"{past}/held", present: f"{present}/held"}
        held, rest = [past, "no_tokens", CACHED_TOKENS, "tokens_axis"], f"{present}/rest"
        first.append(helper.make_node("Slice", held, [inner[past]]))
        size = helper.make_node(
            "Shape", [inner[present]], [f"{rest}/from"], start=AXIS, end=AXIS + 1
        )
        beyond = [past, f"{rest}/from", "end_of_axis", "tokens_axis"]
        joined = helper.make_node("Concat", [inner[present], rest], [present], axis=AXIS)
        last += [size, helper.make_node("Slice", beyond, [rest]), joined]
    for node in made.node:
        node.input[:] = [inner.get(name, name) for name in node.input]
        node.output[:] = [inner.get(name, name) for name in node.output]
    body = [*first, *made.node, *last]
    del made.node[:]
    made.node.extend(body)
    made.input.append(CACHED_TOKENS)
    name_overload(made)
    return made
