"""Nodes of a Scan's step that would do for all tokens what they do for one, and their shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import onnx_graphsurgeon as gs

from linexport.graph.dims import Shape
from linexport.graph.inference import inferred_outputs
from linexport.graph.operators import COPIES, ELEMENTWISE
from linexport.graph.tensors import known_shape
from linexport.loops.vectorize_over_time import (
    AXES,
    OPERATORS,
    PROJECTIONS,
    axes_of,
    parts_of,
    sliced,
)

ARITHMETIC = COPIES | {"Add", "Sub", "Mul", "Div", "Neg"}
"""Elementwise operators that recognition follows."""


def scanned_axes(scan: gs.Node) -> list[int]:
    """Return the axes of the scanned inputs, counted from the first."""
    count = scan.attrs["num_scan_inputs"]
    axes = scan.attrs.get("scan_input_axes") or [0] * count
    return [a % len(known_shape(t)) for a, t in zip(axes, scan.inputs[-count:], strict=True)]


def output_axes(scan: gs.Node) -> list[int]:
    """Return the axes of the steps in the stacked outputs, counted from the first."""
    count = len(scan.inputs) - scan.attrs["num_scan_inputs"]
    stacked = scan.outputs[count:]
    axes = scan.attrs.get("scan_output_axes") or [0] * len(stacked)
    return [a % len(known_shape(t)) if a else a for a, t in zip(axes, stacked, strict=True)]


def keep_outputs(scan: gs.Node, places: list[int]) -> None:
    """Let a Scan give those of its outputs alone that are in some places, states among them."""
    body, axes = scan.attrs["body"], output_axes(scan)
    count = len(scan.outputs) - len(axes)
    body.outputs = [body.outputs[i] for i in places]
    scan.outputs = [scan.outputs[i] for i in places]
    scan.attrs["scan_output_axes"] = [axes[i - count] for i in places if i >= count]


def with_steps_along(axis: int, whole: gs.Tensor, output: gs.Variable) -> gs.Node:
    """Return the node that moves the steps of values from the first axis to another one."""
    order = list(range(1, len(known_shape(whole))))
    order.insert(axis, 0)
    op, attrs = ("Transpose", {"perm": order}) if axis else ("Identity", {})
    return gs.Node(op, f"{output.name}/{op}", attrs, [whole], [output])


def give_every_step(scan: gs.Node, tensor: gs.Tensor, shape: Shape, name: str) -> gs.Variable:
    """Let a Scan give a value of its body of every step; returns all of them, steps first.

    Args:
        scan: gets one output more.
        tensor: the value.
        shape: of it at one step.
        name: ends the names of the copy that the body gives, and of the output.
    """
    body, axes = scan.attrs["body"], scanned_axes(scan)
    states, stem = len(body.inputs) - len(axes), scan.name or scan.outputs[0].name
    length = known_shape(scan.inputs[states])[axes[0]]
    sides = output_axes(scan)
    # A body must not give one value twice.
    taken, inner, count = {o.name for n in body.nodes for o in n.outputs}, name, 1
    while f"{tensor.name}/{inner}" in taken:
        inner, count = f"{name}_{count}", count + 1
    copy = gs.Variable(f"{tensor.name}/{inner}", tensor.dtype, list(shape))
    body.nodes.append(gs.Node("Identity", copy.name, {}, [tensor], [copy]))
    body.outputs.append(copy)
    found = gs.Variable(f"{stem}/{tensor.name}/{inner}", tensor.dtype, [length, *shape])
    scan.outputs.append(found)
    scan.attrs["scan_output_axes"] = [*sides, 0]
    return found


def copy_given(body: gs.Graph) -> None:
    """Let a body give copies of those of its inputs that it gives as they are.

    ONNX Runtime may leave the state that a scanned input becomes unwritten.
    """
    given = {id(t) for t in body.inputs}
    for place, tensor in enumerate(body.outputs):
        if id(tensor) in given:
            copy = gs.Variable(f"{tensor.name}/copy_{place}", tensor.dtype, tensor.shape)
            body.nodes.append(gs.Node("Identity", copy.name, {}, [tensor], [copy]))
            body.outputs[place] = copy


def numbers_in(tensors: Iterable[gs.Tensor], shapes: Mapping[str, Shape] | None = None) -> int:
    """Return how many numbers values have together, for each sequence of the batch.

    Args:
        tensors: the values.
        shapes: of those whose own shape is not noted, by name.
    """
    known = [(shapes or {}).get(t.name) or list(t.shape or ()) for t in tensors]
    return sum(math.prod(n for n in shape if isinstance(n, int)) for shape in known)


def drop_unread(scan: gs.Node, axes: list[int]) -> None:
    """Write the axes of the scanned inputs, without inputs that the body reads no more.

    One is left where none is read: it says how many steps there are.
    """
    body = scan.attrs["body"]
    read = {t.name for n in body.nodes for t in n.inputs} | {t.name for t in body.outputs}
    states = len(body.inputs) - len(axes)
    kept = [i for i, t in enumerate(body.inputs[states:]) if t.name in read] or [0]
    body.inputs = [*body.inputs[:states], *(body.inputs[states + i] for i in kept)]
    scan.inputs = [*scan.inputs[:states], *(scan.inputs[states + i] for i in kept)]
    scan.attrs["scan_input_axes"] = [axes[i] for i in kept]
    scan.attrs["num_scan_inputs"] = len(kept)


def leaves(node: gs.Node, within: set[str], shapes: dict[str, Shape], outer: bool) -> bool:
    """Return whether a node can leave.

    Args:
        node: of the body.
        within: names of the body's values; those that are the same at every step are taken out.
        shapes: of what tokens alone decide, at one step; what the node computes is added.
        outer: outer products leave as well.
    """
    reads = [t for t in node.inputs if t.name in within]
    if node.op not in OPERATORS or any(t.name not in shapes for t in reads):
        return False
    if not reads:
        # It reads no value of the body: loop-invariant.
        within.difference_update(o.name for o in node.outputs)
        _write_shape(node)
        return True
    if any(t.is_empty() for t in node.inputs) or not _is_for_each_token(node, shapes):
        return False
    found = _computed(node, shapes, outer)
    if found is None:
        return False
    shapes |= found
    return True


def _write_shape(node: gs.Node) -> None:
    """Write the shapes of what is the same at every step, such as a number cast to a type."""
    if node.op in ELEMENTWISE and node.outputs[0].shape is None:
        node.outputs[0].shape = broadcast(_written(t) for t in node.inputs)


def _computed(node: gs.Node, shapes: Mapping[str, Shape], outer: bool) -> dict[str, Shape] | None:
    """Return the shapes of what a node computes at one step; None where one is not known."""
    if node.op in ELEMENTWISE:
        given = [shapes.get(t.name) or _written(t) for t in node.inputs]
        shape = broadcast(given)
        if shape is None:
            return None
        # A value not larger than other values of a token may leave the step as these do.
        large = _size(shape) not in map(_size, shapes.values())
        if large and not outer and _is_outer(shape, [s for s in given if s]):
            return None
        return {node.outputs[0].name: shape}
    if node.op == "SplitToSequence":
        return {node.outputs[0].name: shapes[node.inputs[0].name]}
    if node.op == "Slice":
        shape = sliced(node, shapes[node.inputs[0].name])
        return None if shape is None else {node.outputs[0].name: shape}
    written = {o.name: _written(o) for o in node.outputs}
    known = {name: shape for name, shape in written.items() if shape is not None}
    return known if len(known) == len(written) else inferred(node, shapes)


def inferred(node: gs.Node, shapes: Mapping[str, Shape]) -> dict[str, Shape] | None:
    """Return the shapes of what a node computes at one step, as onnx infers them; None if not."""
    if any((shapes.get(t.name) or _written(t)) is None for t in node.inputs):
        return None
    found = inferred_outputs(node, shapes)
    if found is None:
        return None
    dims = {name: kind.tensor_type.shape.dim for name, kind in found.items()}
    sizes: dict[str, Shape] = {
        name: [d.dim_param or d.dim_value for d in of] for name, of in dims.items()
    }
    return sizes if all(all(shape) for shape in sizes.values()) and sizes else None


def multiplies(node: gs.Node, within: set[str], shapes: dict[str, Shape]) -> bool:
    """Return whether a product of matrices is the same for all tokens; its shape is added."""
    ranks = {len(shapes[t.name]) for t in node.inputs if t.name in shapes}
    outside = [len(t.shape or ()) for t in node.inputs if t.name not in shapes]
    # One more axis in front of the tokens' operands still broadcasts with matrices of no more axes
    # than these have; an Einsum with its result stated takes one more letter.
    written_out = node.op == "Einsum" and "->" in node.attrs["equation"]
    same = written_out or (
        node.op == "MatMul" and len(ranks) == 1 and max([2, *outside]) <= min(ranks)
    )
    if not same or not ranks:
        return False
    if any(t.name in within for t in node.inputs if t.name not in shapes):
        return False
    found = inferred(node, shapes)
    shapes |= found or {}
    return found is not None


def _written(tensor: gs.Tensor) -> Shape | None:
    return None if tensor.shape is None else list(tensor.shape)


def broadcast(shapes: Iterable[Shape | None]) -> Shape | None:
    """Return the shape that these are broadcast to, by numpy's rules."""
    found: Shape = []
    for shape in shapes:
        if shape is None:
            return None
        rank = max(len(found), len(shape))
        rows: list[Shape] = [[*[1] * (rank - len(s)), *s] for s in (found, shape)]
        found = [a if b == 1 else b for a, b in zip(*rows, strict=True)]
        if any(a not in (1, size) for row in rows for a, size in zip(row, found, strict=True)):
            return None
    return found


def _is_outer(shape: Shape, given: Iterable[Shape]) -> bool:
    """Return whether an elementwise result is larger than each of the values it is made of."""
    return not any(_size(one) == _size(shape) for one in given)


def _size(shape: Shape) -> tuple[int, list[str]]:
    symbols = sorted(n for n in shape if isinstance(n, str))
    return math.prod(n for n in shape if isinstance(n, int)), symbols


def _is_for_each_token(node: gs.Node, shapes: Mapping[str, Shape]) -> bool:
    """Return whether the same node does for all tokens what it does for one."""
    if node.op in ELEMENTWISE:
        return True
    first, rest = node.inputs[0], node.inputs[1:]
    if node.op == "Concat":
        ranks = {len(shapes[t.name]) for t in node.inputs if t.name in shapes}
        return all(t.name in shapes for t in node.inputs) and len(ranks) == 1
    if first.name not in shapes or any(t.name in shapes for t in rest):
        return False
    if node.op in PROJECTIONS:
        return _is_projection(node, shapes[first.name])
    if node.op == "Transpose":
        return "perm" in node.attrs
    if node.op == "SplitToSequence":
        known = parts_of(node, shapes[first.name]) is not None
        return known and all(_is_one_part(n) for n in node.outputs[0].outputs)
    if node.op == "SequenceAt":
        return _is_one_part(node)
    if node.op == "Reshape":
        return _keeps_batch(shapes[first.name], _written(node.outputs[0]) or [])
    if node.op == "Expand":
        # Only to a size that other values of a token have: an outer product is kept in the step.
        after = _written(node.outputs[0]) or []
        sizes = [_size(shape) for shape in shapes.values()]
        # Of the same rank, since the axis of the tokens is added in front of all others.
        return len(after) == len(shapes[first.name]) and _size(after) in sizes
    return node.op not in AXES or axes_of(node) is not None


def _keeps_batch(before: Shape, after: Shape) -> bool:
    """Return whether a Reshape keeps the batch as the first axis, behind which sizes are fixed.

    Tokens and batch are then both a 0 of the shape.
    """
    return bool(after) and after[:1] == before[:1] and all(isinstance(n, int) for n in after[1:])


def _is_one_part(node: gs.Node) -> bool:
    return node.op == "SequenceAt" and isinstance(node.inputs[1], gs.Constant)


def _is_projection(node: gs.Node, first: Shape) -> bool:
    """Return whether a product is one of tokens with a matrix, and what is added a vector."""
    if len(first) < 2 or len(node.inputs[1].shape or ()) != 2:
        return False
    # A Gemm of other attributes is more than x W + b.
    plain = {"transA": 0, "alpha": 1.0, "beta": 1.0}
    return all(node.attrs.get(name, value) == value for name, value in plain.items())
