"""Program of a few steps of a loop -> its nodes whose values are those of a single step.

x (B, T, D)  ->  x_0, ..., x_6  ->  h_1, ..., h_7  ->  steps(h_1, ..., h_7; T)  ->  y (B, T, D)
known               unknown: at T tokens there are T of them                  unknown
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch.fx import Graph, Node

from linexport.system.torch_internals.sizes import symbols
from linexport.trace.loops import capture


def values_of_steps(graph: Graph) -> set[Node]:
    """Return the nodes that are other values at other lengths than that of the trace.

    Those are what steps compute, what is put together of them, and all that reads it.
    """
    marks = {n for n in graph.nodes if n.target is capture.OPERATOR}
    unknown = {*marks}
    for mark in marks:
        steps, length = mark.args
        behind = _behind(steps, marks)
        whole = {n for n in behind if _sizes(n) & _symbols(length)}
        unknown |= behind - whole - _behind(whole, marks)
    for node in graph.nodes:
        if node.op != "output" and unknown & {*node.all_input_nodes}:
            unknown.add(node)
    return {n for n in unknown if n.op != "placeholder"}


def _behind(nodes: Iterable[object], marks: Collection[Node]) -> set[Node]:
    """Return nodes and what they are computed of, up to what loops give."""
    found: set[Node] = set()
    waiting = [n for n in nodes if isinstance(n, Node)]
    while waiting:
        node = waiting.pop()
        if node not in found and node not in marks:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _sizes(node: Node) -> set[Any]:
    """Return the symbols among the sizes of a value."""
    return {s for size in getattr(node.meta.get("val"), "shape", ()) for s in _symbols(size)}


def _symbols(size: object) -> set[object]:
    return symbols(size.meta.get("val") if isinstance(size, Node) else size)
