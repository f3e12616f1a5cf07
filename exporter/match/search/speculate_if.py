"""Bodies of an If that may both be computed, whichever is chosen.

A body leaves its If where it cannot fail in the case it is not for: it has no indices and no loops,
and the condition is not of sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_graphsurgeon as gs

from linexport.graph.operators import INDEXING, SIZES_ONLY

BRANCHES = ("then_branch", "else_branch")

MAY_FAIL = INDEXING | {"If", "Loop", "OneHot"}
"""Operators that fail on some values of what they are given."""


def why_kept(node: gs.Node) -> str:
    """Return why the bodies of an If may not both be computed; "" where they may."""
    bodies = [node.attrs[name] for name in BRANCHES]
    for body in bodies:
        for inner in body.nodes:
            if inner.op in MAY_FAIL or inner.domain:
                return f"{inner.op} of a body may fail where the other body is chosen"
    if any(n.op in SIZES_ONLY for n in _before(node.inputs[0])):
        return "a size decides, and a body may fail at the sizes that it is not for"
    for one, other in zip(*(body.outputs for body in bodies), strict=True):
        if not one.shape or one.shape != other.shape or one.dtype != other.dtype:
            return f"its bodies give {one.shape} and {other.shape}"
    return ""


def _before(tensor: gs.Tensor) -> Iterator[gs.Node]:
    """Every node by whose values a tensor is computed."""
    found, left = set[int](), list(tensor.inputs)
    while left:
        node = left.pop()
        if id(node) not in found:
            found.add(id(node))
            yield node
            # In another shape the same entries decide.
            skipped = 1 if node.op == "Reshape" else None
            given = [t for place, t in enumerate(node.inputs) if place != skipped]
            left += [n for t in given for n in t.inputs]
