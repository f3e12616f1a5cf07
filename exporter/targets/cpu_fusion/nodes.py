"""Operators that a program of tokens can have, each with the shape of its result and its form.

``results`` says what a node makes of every token, None where a program cannot; ``write`` adds it to
a program and returns the places of its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx

from linexport.graph.dims import StaticShape
from linexport.plugins.ops.op import attribute_value
from linexport.targets.cpu_fusion.program import Program, TensorView, UnfitError
from linexport.targets.cpu_fusion.values import LEAD, TokenValues, Value

UNARY = ("Neg", "Exp", "Log", "Sigmoid", "Softplus", "Sqrt", "Reciprocal", "Relu", "Abs")
BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Greater")
MEANS = {"ReduceMean": "Mean", "ReduceSum": "Sum"}
VIEWS = ("Reshape", "Unsqueeze", "Squeeze")
"""Operators that move nothing."""

CUTS = ("Split", "Slice")
PARTS = (*CUTS, "Concat")


def attributes(node: onnx.NodeProto) -> Mapping[str, Any]:
    """Return a node's attributes by name."""
    return {a.name: attribute_value(a) for a in node.attribute}


def results(node: onnx.NodeProto, values: TokenValues) -> list[Value] | None:
    """Return what the node makes of every token, None where a program has no form of it."""
    if node.domain or node.op_type not in RULES:
        return None
    if not all(values.are_known(name) for name in data_inputs(node)):
        return None
    read = [values.tokens[name] for name in data_inputs(node) if name in values.tokens]
    if not read or len({(value.lead, value.is_flat) for value in read}) > 1:
        return None
    if not _takes_conditions(node, read):
        return None
    flat = _flat(node, values, read[0])
    shapes = [flat] if flat else RULES[node.op_type](node, values, read)
    if shapes is None or len(shapes) != len(node.output):
        return None
    is_flat = bool(flat) or (read[0].is_flat and node.op_type not in VIEWS)
    if is_flat and node.op_type in PARTS:
        return None
    made = [Value(read[0].lead, shape, node.op_type == "Greater", is_flat) for shape in shapes]
    stated = (values.tokens.get(name, own) for name, own in zip(node.output, made, strict=True))
    return made if all(a == b for a, b in zip(stated, made, strict=True)) else None


def _takes_conditions(node: onnx.NodeProto, read: Sequence[Value]) -> bool:
    """Return whether conditions are read as the first input of a Where alone."""
    first, *rest = (value.is_condition for value in read)
    return not any(rest) and (not first or node.op_type == "Where")


def _flat(node: onnx.NodeProto, values: TokenValues, read: Value) -> StaticShape | None:
    """Return the axes of a token where a Reshape puts all but the last into one."""
    if node.op_type != "Reshape" or read.is_flat:
        return None
    sizes, whole = values.integers.get(node.input[1], []), prod(read.shape)
    fits = len(sizes) == LEAD and sizes[0] == -1 and sizes[1] > 0 and whole % sizes[1] == 0
    return (whole // sizes[1], sizes[1]) if fits else None


def data_inputs(node: onnx.NodeProto) -> Sequence[str]:
    """Return the inputs that are computed with; others are shapes, axes and exponents."""
    everything = (*BINARY, "Where", "Concat")
    return node.input if node.op_type in everything else node.input[:1]


def _same(
    node: onnx.NodeProto, values: TokenValues, read: Sequence[Value]
) -> list[StaticShape] | None:
    return [read[0].shape]


def _of_two(
    node: onnx.NodeProto, values: TokenValues, read: Sequence[Value]
) -> list[StaticShape] | None:
    return _broadcast(node, values) if len(node.input) == 2 else None


def _chosen(
    node: onnx.NodeProto, values: TokenValues, read: Sequence[Value]
) -> list[StaticShape] | None:
    return _broadcast(node, values) if node.input[0] in values.tokens else None


def _square(
    node: onnx.NodeProto, values: TokenValues, read: Sequence[Value]
) -> list[StaticShape] | None:
    exponent, _ = values.numbers.get(node.input[1], (0, 0))
    return [read[0].shape] if exponent == 2 else None


def _clipped(
    node: onnx.NodeProto, values: TokenValues, read: Sequence[Value]
) -> list[StaticShape] | None:
    bounds = [name for name in node.input[1:] if name]
    return [read[0].shape] if all(name in values.numbers for name in bounds) else None


def _mean(
    node: onnx.NodeProto, values: TokenValues, read: Sequence[Value]
) -> list[StaticShape] | None:
    axes, keeps = _integers(node, values), attributes(node).get("keepdims", 1) == 1
    last = keeps and axes in ([-1], [read[0].rank - 1])
    return [(*read[0].shape[:-1], 1)] if last else None


def _viewed(
    node: onnx.NodeProto, values: TokenValues, read: Sequence[Value]
) -> list[StaticShape] | None:
    made = values.tokens.get(node.output[0])
    if made is None or made.lead != read[0].lead or prod(made.shape) != prod(read[0].shape):
        return None
    return [made.shape]


def _split(
    node: onnx.NodeProto, values: TokenValues, read: Sequence[Value]
) -> list[StaticShape] | None:
    axis, sizes = _axis(node, read[0].shape), _integers(node, values)
    if axis is None or sizes is None or sum(sizes) != read[0].shape[axis] or min(sizes) < 1:
        return None
    return [_with(read[0].shape, axis, size) for size in sizes]


def _sliced(
    node: onnx.NodeProto, values: TokenValues, read: Sequence[Value]
) -> list[StaticShape] | None:
    cut = _cut(node, values, read[0].shape)
    return None if cut is None else [_with(read[0].shape, cut[0], cut[2])]


def _joined(
    node: onnx.NodeProto, values: TokenValues, read: Sequence[Value]
) -> list[StaticShape] | None:
    shapes = [value.shape for value in read]
    axis = _axis(node, shapes[0])
    if axis is None or len(read) != len(node.input) or len({len(s) for s in shapes}) > 1:
        return None
    if len({_with(shape, axis, 0) for shape in shapes}) > 1:
        return None
    return [_with(shapes[0], axis, sum(shape[axis] for shape in shapes))]


Rule = Callable[[onnx.NodeProto, TokenValues, Sequence[Value]], list[StaticShape] | None]

RULES: dict[str, Rule] = {
    **dict.fromkeys(UNARY, _same),
    **dict.fromkeys(BINARY, _of_two),
    **dict.fromkeys(MEANS, _mean),
    **dict.fromkeys(VIEWS, _viewed),
    "Where": _chosen,
    "Pow": _square,
    "Clip": _clipped,
    "Split": _split,
    "Slice": _sliced,
    "Concat": _joined,
}
"""The shapes of an operator's results for a token, None where a program has no form of the node."""


def _with(shape: StaticShape, axis: int, size: int) -> StaticShape:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _axis(node: onnx.NodeProto, shape: StaticShape) -> int | None:
    """Return an operator's axis behind batch and token."""
    axis = attributes(node).get("axis", 0)
    assert isinstance(axis, int)
    own = axis - LEAD if axis >= 0 else axis + len(shape)
    return own if 0 <= own < len(shape) else None


def _integers(node: onnx.NodeProto, values: TokenValues) -> list[int] | None:
    """Return the second input, axes or sizes, where it is known."""
    return values.integers.get(node.input[1]) if len(node.input) > 1 else None


def _cut(
    node: onnx.NodeProto, values: TokenValues, shape: StaticShape
) -> tuple[int, int, int] | None:
    """Return axis, start and size of a Slice of one axis by step 1."""
    found = [values.integers.get(name) for name in node.input[1:]]
    if len(found) < 3 or any(one is None or len(one) != 1 for one in found):
        return None
    start, end, axis, *step = (one[0] for one in found if one)
    own = axis - LEAD if axis >= 0 else axis + len(shape)
    if step not in ([], [1]) or not 0 <= own < len(shape):
        return None
    first, last, _ = slice(start, end).indices(shape[own])
    return (own, first, last - first) if last > first else None


def _broadcast(node: onnx.NodeProto, values: TokenValues) -> list[StaticShape] | None:
    """Return the shape of the operands together; those of tokens have the same axes."""
    read = [values.tokens[name] for name in node.input if name in values.tokens]
    rank, is_flat = len(read[0].shape), read[0].is_flat
    if any(len(value.shape) != rank for value in read):
        return None
    shapes = []
    for name in node.input:
        if name in values.tokens:
            shapes.append(values.tokens[name].shape)
            continue
        own = own_axes(name, values, rank)
        if own is None or (is_flat and any(n != 1 for n in own[:-1])):
            return None
        shapes.append(own)
    try:
        return [tuple(int(size) for size in np.broadcast_shapes(*shapes))]
    except ValueError:
        return None


def own_axes(name: str, values: TokenValues, rank: int) -> StaticShape | None:
    """Return the axes of a weight or number that go with those of a token; None if it has more."""
    shape = values.weights[name] if name in values.weights else (1,) * values.numbers[name][1]
    behind = max(len(shape) - rank, 0)
    return shape[behind:] if behind <= LEAD and all(n == 1 for n in shape[:behind]) else None


def write(
    node: onnx.NodeProto,
    values: TokenValues,
    program: Program,
    read: Callable[[str, int], TensorView],
    target: Callable[[str, StaticShape], TensorView],
) -> list[TensorView]:
    """Add a node to a program; return where its outputs are.

    Args:
        node: one that has ``results``.
        values: of the graph.
        program: changed in place.
        read: returns the place of an input, given its name and the axes of a token.
        target: returns where an output goes, given its name and shape.

    Raises:
        UnfitError: the library has no form for it.
    """
    op, shapes = node.op_type, [values.tokens[name].shape for name in node.output]
    sources = [read(name, len(shapes[0])) for name in data_inputs(node)]
    if op in VIEWS:
        [source], [shape] = sources, shapes
        if not source.is_packed:
            room = program.room(source.shape)
            program.add("Copy", room, [source], source.shape)
            source = room
        return [source.reshaped(shape)]
    if op in CUTS:
        return [sources[0].part(*one) for one in parts_of(node, values)]
    [shape] = shapes
    to = target(node.output[0], shape)
    if op == "Concat":
        axis, start = _axis(node, shape), 0
        assert axis is not None
        for source in sources:
            size = source.shape[axis]
            program.add("Copy", to.part(axis, start, size), [source], source.shape)
            start += size
    elif op == "Clip":
        for code, bound in zip(("Max", "Min"), node.input[1:], strict=False):
            if bound:
                program.add(code, to, [sources[0], read(bound, len(shape))], shape)
                sources = [to]
        if sources[0] is not to:
            program.add("Copy", to, sources, shape)
    elif op in MEANS:
        _add_mean(MEANS[op], program, to, sources[0])
    else:
        program.add("Square" if op == "Pow" else op, to, sources, shape)
    return [to]


def parts_of(node: onnx.NodeProto, values: TokenValues) -> list[tuple[int, int, int]]:
    """Return axis, start and size of each output of a Split or Slice that has ``results``."""
    shape = values.tokens[node.input[0]].shape
    if node.op_type == "Slice":
        cut = _cut(node, values, shape)
        assert cut is not None
        return [cut]
    axis = _axis(node, shape)
    assert axis is not None
    sizes = [values.tokens[name].shape[axis] for name in node.output]
    starts = np.cumsum([0, *sizes]).tolist()
    return [(axis, start, size) for start, size in zip(starts, sizes, strict=False)]


def _add_mean(name: str, program: Program, to: TensorView, source: TensorView) -> None:
    if source.shape[-1] == 1:
        program.add("Copy", to, [source], to.shape)
        return
    if source.steps[-1] != 1:
        raise UnfitError("a mean of elements that are not one behind the other")
    program.add(name, to, [source], source.shape)
