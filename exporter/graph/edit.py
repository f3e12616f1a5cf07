"""Reading and editing an onnx-graphsurgeon graph: producers, consumers, replacement.

    Identity(x), x * 1, x / 1, x[0:END],
    Cast, CastLike, Expand, Reshape or Transpose to what x is    ->    x

``identity_of`` finds the x of these; ``replace_all_uses_with`` lets consumers take it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import helper

from linexport.graph.operators import SIZES_ONLY, typed_like_output
from linexport.graph.tensors import constant_values

WIDENED = (onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT)
"""Type that a value is cast back to, and the one that it was cast to before."""

END = np.iinfo(np.int64).max
"""The end of an axis as exporters write it."""


def with_bodies(graph: gs.Graph) -> Iterator[gs.Graph]:
    """Yield a graph, and those of the loops and branches in it."""
    yield graph
    for node in graph.nodes:
        for body in (a for a in node.attrs.values() if isinstance(a, gs.Graph)):
            yield from with_bodies(body)


def producer(tensor: gs.Tensor, op: str | None = None) -> gs.Node | None:
    """Return the node that computes a tensor; None if there is none or it is not an ``op``."""
    node = tensor.inputs[0] if tensor.inputs else None
    return node if node is not None and op in (None, node.op) else None


def consumers(node: gs.Node) -> list[gs.Node]:
    """Return the nodes that read any output of a node."""
    return [consumer for tensor in node.outputs for consumer in tensor.outputs]


def original_of(tensor: gs.Tensor) -> gs.Tensor:
    """Return what a tensor is a copy of, by any number of Identity nodes."""
    while (node := producer(tensor, "Identity")) is not None:
        tensor = node.inputs[0]
    return tensor


def index_of(graph: gs.Graph, node: gs.Node) -> int:
    """Return the place of a node in its graph, by identity: nodes compare equal by content."""
    return next(i for i, other in enumerate(graph.nodes) if other is node)


def nodes_behind(
    tensors: Iterable[gs.Tensor], ends: Container[str] = (), known: Iterable[gs.Node] = ()
) -> list[gs.Node]:
    """Return the nodes that tensors are computed by.

    Args:
        tensors: where to begin.
        ends: operators whose inputs are not followed.
        known: nodes that are returned as well, and not followed.
    """
    found = {id(node): node for node in known}
    pending = list(tensors)
    while pending:
        for node in pending.pop().inputs:
            if id(node) not in found:
                found[id(node)] = node
                pending += [] if node.op in ends else node.inputs
    return list(found.values())


def detach(nodes: Iterable[gs.Node]) -> None:
    """Detach nodes that were written from the graph, whose tensors list their consumers."""
    for node in nodes:
        node.inputs.clear()
        node.outputs.clear()


def is_of_weights(tensor: gs.Tensor) -> bool:
    """Return whether a tensor depends on no input of the graph but by its sizes."""
    seen, pending = set[int](), [tensor]
    while pending:
        makers = pending.pop().inputs
        if not makers:
            return False
        for node in makers:
            if id(node) not in seen and node.op not in SIZES_ONLY:
                seen.add(id(node))
                pending += [
                    t for t in node.inputs if not isinstance(t, gs.Constant) and not t.is_empty()
                ]
    return True


def is_output(graph: gs.Graph, tensor: gs.Tensor) -> bool:
    """Return whether a tensor is a graph output, by identity: tensors compare equal by name."""
    return any(tensor is output for output in graph.outputs)


def is_read(graph: gs.Graph, tensor: gs.Tensor) -> bool:
    """Return whether a node reads a tensor, or the graph gives it."""
    return bool(tensor.outputs) or is_output(graph, tensor)


def replace_all_uses_with(node: gs.Node, values: Sequence[gs.Tensor]) -> None:
    """Let consumers of a node's outputs read ``values`` instead, and disconnect the node.

    Values without a known shape take the type and the shape of what they replace.
    """
    for old, new in zip(node.outputs, values, strict=True):
        if isinstance(new, gs.Variable) and new.shape is None:
            new.shape, new.dtype = old.shape, old.dtype
        for consumer in list(old.outputs):
            consumer.inputs = [new if tensor is old else tensor for tensor in consumer.inputs]
    node.inputs.clear()
    node.outputs.clear()


def merge_reshapes(node: gs.Node) -> bool:
    """Let a Reshape of a Reshape read the first one's input; returns whether it does now."""
    before = producer(node.inputs[0], "Reshape")
    shape = node.inputs[1]
    # A 0 without allowzero takes a size of the input, which must then stay the same.
    free = node.attrs.get("allowzero", 0) or (
        isinstance(shape, gs.Constant) and (shape.values != 0).all()
    )
    if before is None or not free:
        return False
    node.inputs[0] = before.inputs[0]
    return True


def name_type(node: gs.Node) -> bool:
    """Let a CastLike be a Cast to the type it takes of its second input; returns whether it is."""
    to = element_type_of(node.inputs[1]) if node.op == "CastLike" else None
    if to is None:
        return False
    node.op, node.attrs, node.inputs = "Cast", {"to": to}, node.inputs[:1]
    return True


def identity_of(node: gs.Node) -> gs.Tensor | None:
    """Return the input that a node's output always equals, to the bit; None if there is none."""
    source = node.inputs[0] if node.inputs else None
    if node.op == "Identity" or (node.op == "Slice" and _slices_nothing_off(node)):
        return source
    if node.op == "Concat" and len(node.inputs) == 1:
        return source
    if node.op == "Transpose" and _keeps_order(node):
        return source
    if node.op in ("Mul", "Div"):
        return _times_one(node)
    if node.op in ("Expand", "Reshape") and source is not None:
        before, after = (list(t.shape or ()) for t in (source, node.outputs[0]))
        named = before and not any(size in (None, "") for size in before)
        return source if named and before == after else None
    if node.op in ("Cast", "CastLike") and source is not None:
        to = _code(node.attrs["to"]) if node.op == "Cast" else element_type_of(node.inputs[1])
        cast = producer(source, "Cast")
        if cast is not None and (to, element_type_of(source)) == WIDENED:
            source = cast.inputs[0]  # float32 has every number of float16
        return source if to is not None and element_type_of(source) == to else None
    return None


def _keeps_order(node: gs.Node) -> bool:
    """Return whether a Transpose leaves the axes where they are."""
    order = node.attrs.get("perm")
    return order is not None and list(order) == sorted(order)


def _times_one(node: gs.Node) -> gs.Tensor | None:
    """Return the other factor, or the dividend, where the shape of the output is its own."""
    pairs = [tuple(node.inputs), *([tuple(reversed(node.inputs))] if node.op == "Mul" else [])]
    for other, one in pairs:
        if isinstance(one, gs.Constant) and np.prod(one.shape) == 1 and one.values.item() == 1:
            # A one of higher rank would add axes to the product.
            rank = len(one.shape)
            return other if rank == 0 or len(other.shape or ()) >= rank else None
    return None


def _slices_nothing_off(node: gs.Node) -> bool:
    """Return whether a Slice takes every element, from the first to beyond any last."""
    starts, *others = (constant_values(tensor) for tensor in node.inputs[1:])
    known = [values for values in others if values is not None]
    if len(known) != len(others):
        return False
    ends, *rest = known
    steps = rest[1] if len(rest) > 1 else np.ones(1)
    if not ((ends == END).all() and (steps == 1).all()):
        return False
    if starts is not None:
        return bool((starts == 0).all())
    axis = rest[0].item() if rest and rest[0].size == 1 else None
    return axis is not None and _starts_a_length_before(node, axis)


def _starts_a_length_before(node: gs.Node, axis: int) -> bool:
    """Return whether a Slice's start, computed in the graph, is minus the sliced axis' size."""
    source, start = node.inputs[0], _unwrapped(node.inputs[1])
    if start is None or start.op != "Neg" or source.shape is None:
        return False
    size = _unwrapped(start.inputs[0])
    if size is None or size.op != "Shape" or size.inputs[0].shape is None:
        return False
    first = size.attrs.get("start", 0)
    sizes = list(size.inputs[0].shape)[first : size.attrs.get("end")]
    return len(sizes) == 1 and sizes[0] not in (None, "") and sizes[0] == source.shape[axis]


def _unwrapped(tensor: gs.Tensor) -> gs.Node | None:
    """Return the node that computed a single number, before its shape was changed."""
    node = producer(tensor)
    while node is not None and node.op in ("Squeeze", "Unsqueeze", "Reshape"):
        node = producer(node.inputs[0])
    return node


def element_type_of(tensor: gs.Tensor) -> int | None:
    """Return ONNX's number of the dtype, from what it is computed of where none is noted."""
    while tensor.dtype is None and (node := producer(tensor)) is not None:
        own = not node.domain and tensor is node.outputs[0]
        places = typed_like_output(node.op) if own else ()
        given = [node.inputs[i] for i in places if i < len(node.inputs)]
        if not given:
            break
        tensor = next((t for t in given if t.dtype is not None), given[0])
    if tensor.dtype is None and producer(tensor, "Shape"):
        return onnx.TensorProto.INT64
    return None if tensor.dtype is None else _code(tensor.dtype)


def _code(to: Any) -> int:
    return to if isinstance(to, int) else helper.np_dtype_to_tensor_dtype(np.dtype(to))
