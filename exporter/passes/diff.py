"""The difference of two graphs as text.

    nodes 12 -> 10, initializers 7 -> 6

    changed (1)
    ~ Mul "norm/Mul"
        op      Mul -> Div
        inputs  x, r -> x, root
    removed (2)
    - Reciprocal "norm/Reciprocal" (root) -> (r)
    ...

A node is the same before and after if it has the same name, or, where it has none, computes a value
of the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import onnx
from onnx import helper

from linexport.plugins.ops.registry import dim_of

T = TypeVar("T")

WIDEST = 60
"""Characters of an attribute's value that are shown."""


def graph_diff(before: onnx.ModelProto, after: onnx.ModelProto) -> str:
    """Return the difference of two graphs, of which values of initializers are not compared."""
    old, new = before.graph, after.graph
    lines = [
        f"nodes {len(old.node)} -> {len(new.node)}, "
        f"initializers {len(old.initializer)} -> {len(new.initializer)}"
    ]
    lines += _sections("", _by_key(old.node), _by_key(new.node), _node, _changes)
    for title, ends in (("inputs", "input"), ("outputs", "output")):
        lines += _sections(title, _named(getattr(old, ends)), _named(getattr(new, ends)), _value)
    lines += _sections("initializers", _named(old.initializer), _named(new.initializer), _tensor)
    return "\n".join(lines) + "\n"


def _sections(
    title: str,
    old: Mapping[str, T],
    new: Mapping[str, T],
    describe: Callable[[T], str],
    changes: Callable[[T, T], list[str]] | None = None,
) -> Iterator[str]:
    """Yield what was removed, added and, where ``changes`` can tell, changed."""
    removed = [f"- {describe(old[key])}" for key in old if key not in new]
    added = [f"+ {describe(new[key])}" for key in new if key not in old]
    changed: list[str] = []
    count = 0
    for key in new if changes is not None else ():
        found = changes(old[key], new[key]) if changes and key in old else []
        count += bool(found)
        changed += [f"~ {describe(new[key])}", *(f"    {line}" for line in found)] * bool(found)
    prefix = f"{title} " if title else ""
    for what, size, lines in (
        ("removed", len(removed), removed),
        ("added", len(added), added),
        ("changed", count, changed),
    ):
        if lines:
            yield from ("", f"{prefix}{what} ({size})", *lines)


def _by_key(nodes: Iterable[onnx.NodeProto]) -> dict[str, onnx.NodeProto]:
    return {node.name or next(iter(node.output), ""): node for node in nodes}


def _named(items: Iterable[T]) -> dict[str, T]:
    return {item.name: item for item in items}  # type: ignore[attr-defined]


def _node(node: onnx.NodeProto) -> str:
    return f'{_op(node)} "{node.name}" ({", ".join(node.input)}) -> ({", ".join(node.output)})'


def _op(node: onnx.NodeProto) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type


def _changes(old: onnx.NodeProto, new: onnx.NodeProto) -> list[str]:
    """Return a line for each part of a node that changed."""
    parts = [
        ("op", _op(old), _op(new)),
        ("inputs", ", ".join(old.input), ", ".join(new.input)),
        ("outputs", ", ".join(old.output), ", ".join(new.output)),
    ]
    before, after = _attributes(old), _attributes(new)
    for name in sorted({*before, *after}):
        parts.append((name, before.get(name, "none"), after.get(name, "none")))
    return [f"{name}: {a} -> {b}" for name, a, b in parts if a != b]


def _attributes(node: onnx.NodeProto) -> dict[str, str]:
    found = {}
    for attribute in node.attribute:
        text = str(helper.printable_attribute(attribute)).partition(" = ")[2]
        found[attribute.name] = text if len(text) <= WIDEST else f"{text[:WIDEST]}..."
    return found


def _value(value: onnx.ValueInfoProto) -> str:
    tensor = value.type.tensor_type
    sizes = ", ".join(str(dim_of(d)) for d in tensor.shape.dim)
    return f"{value.name} {_dtype(tensor.elem_type)}[{sizes}]"


def _tensor(tensor: onnx.TensorProto) -> str:
    sizes = ", ".join(map(str, tensor.dims))
    return f"{tensor.name} {_dtype(tensor.data_type)}[{sizes}]"


def _dtype(code: int) -> str:
    return str(onnx.TensorProto.DataType.Name(code)).lower()
