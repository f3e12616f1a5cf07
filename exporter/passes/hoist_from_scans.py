"""Values that a Scan's step computes from its tokens alone -> computed before the Scan, of all.

    Scan over x_t: a = sigmoid(x_t W),         A = sigmoid(X W)
                   h = a h + x_t         ->    Scan over a_t, x_t: h = a_t h + x_t

What is left in the body is a recurrence that recognition can read; in a loop that is not linear,
one product of all tokens takes the place of one for each. Outer products stay in the step: there is
one of them at a time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from linexport.graph.edit import name_type
from linexport.passes.contract import Pass, PassResult, rewrite_matches
from linexport.passes.lifted_steps import (
    AXES,
    ELEMENTWISE,
    OPERATORS,
    PRODUCTS,
    LiftedSteps,
    ScannedTokens,
    Shape,
    axes_of,
    parts_of,
    sliced,
)

log = logging.getLogger(__name__)

LAYOUT = frozenset(("Unsqueeze", "Squeeze", "Transpose", "Identity", "Reshape", "Expand"))
"""Operators that compute nothing: by themselves they are no reason to leave the body."""


@dataclass(frozen=True)
class _Plan:
    """Nodes that leave the body of one Scan, and what they read.

    Attributes:
        nodes: those that leave, in the order of evaluation.
        read: their outputs that the body still reads.
        scanned: what the body reads of tokens, by name.
        shapes: of what leaves and of what is scanned, at one step.
    """

    nodes: list[gs.Node]
    read: list[gs.Tensor]
    scanned: dict[str, ScannedTokens]
    shapes: dict[str, Shape]


def run(graph: gs.Graph) -> PassResult:
    """Take what depends on tokens alone, or on no token, out of every Scan."""
    scans = [n for n in graph.nodes if n.op == "Scan"]
    # What is cast may be a constant, which must not wait for the value that says the type.
    typed = [name_type(node) for scan in scans for node in scan.attrs["body"].nodes]
    return PassResult(rewrite_matches(graph, _plan, _hoist, log).modified or any(typed))


def _plan(graph: gs.Graph, node: gs.Node) -> _Plan | None:
    """Return what can leave a Scan; None where nothing can that computes something."""
    if node.op != "Scan" or _has_directions(node):
        return None
    body, count = node.attrs["body"], node.attrs["num_scan_inputs"]
    inner = body.inputs[-count:]
    if any(t.shape is None for t in (*inner, *node.inputs[-count:])):
        return None
    shapes: dict[str, Shape] = {t.name: list(t.shape) for t in inner}
    within = {t.name for t in (*body.inputs, *(o for n in body.nodes for o in n.outputs))}
    leaving = _worthwhile([n for n in body.nodes if _leaves(n, within, shapes)])
    if not leaving:
        return None
    moved = set(map(id, leaving))
    left = {t.name for n in body.nodes if id(n) not in moved for t in n.inputs}
    left |= {t.name for t in body.outputs}
    read = [o for n in leaving for o in n.outputs if o.name in left and o.name in shapes]
    scanned = zip(inner, node.inputs[-count:], _axes(node), strict=True)
    return _Plan(leaving, read, {i.name: ScannedTokens(o, a) for i, o, a in scanned}, shapes)


def _has_directions(node: gs.Node) -> bool:
    sides = ("scan_input_directions", "scan_output_directions")
    return any(any(node.attrs.get(side) or ()) for side in sides)


def _axes(scan: gs.Node) -> list[int]:
    """Return the axes of the scanned inputs, counted from the first."""
    count = scan.attrs["num_scan_inputs"]
    axes = scan.attrs.get("scan_input_axes") or [0] * count
    return [a % len(t.shape) for a, t in zip(axes, scan.inputs[-count:], strict=True)]


def _leaves(node: gs.Node, within: set[str], shapes: dict[str, Shape]) -> bool:
    """Return whether a node can leave.

    Args:
        node: of the body.
        within: names of the body's values; those that are the same at every step are taken out.
        shapes: of what tokens alone decide, at one step; what the node computes is added.
    """
    reads = [t for t in node.inputs if t.name in within]
    if node.op not in OPERATORS or any(t.name not in shapes for t in reads):
        return False
    if not reads:
        within.difference_update(o.name for o in node.outputs)
        return True
    if any(t.is_empty() for t in node.inputs) or not _is_for_each_token(node, shapes):
        return False
    found = _computed(node, shapes)
    if found is None:
        return False
    shapes |= found
    return True


def _computed(node: gs.Node, shapes: Mapping[str, Shape]) -> dict[str, Shape] | None:
    """Return the shapes of what a node computes at one step; None where one is not known."""
    if node.op in ELEMENTWISE:
        given = [shapes.get(t.name) or _written(t) for t in node.inputs]
        shape = _broadcast(given)
        if shape is None or _is_outer(shape, [s for s in given if s]):
            return None
        return {node.outputs[0].name: shape}
    if node.op == "SplitToSequence":
        return {node.outputs[0].name: shapes[node.inputs[0].name]}
    if node.op == "Slice":
        shape = sliced(node, shapes[node.inputs[0].name])
        return None if shape is None else {node.outputs[0].name: shape}
    written = {o.name: _written(o) for o in node.outputs}
    known = {name: shape for name, shape in written.items() if shape is not None}
    return known if len(known) == len(written) else None


def _written(tensor: gs.Tensor) -> Shape | None:
    return None if tensor.shape is None else list(tensor.shape)


def _broadcast(shapes: Iterable[Shape | None]) -> Shape | None:
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
    if first.name not in shapes or any(t.name in shapes for t in rest):
        return False
    if node.op in PRODUCTS:
        return _is_projection(node, shapes[first.name])
    if node.op == "Transpose":
        return "perm" in node.attrs
    if node.op == "SplitToSequence":
        known = parts_of(node, shapes[first.name]) is not None
        return known and all(_is_one_part(n) for n in node.outputs[0].outputs)
    if node.op == "SequenceAt":
        return _is_one_part(node)
    if node.op == "Reshape":
        before, after = shapes[first.name], _written(node.outputs[0]) or []
        return (
            bool(after) and after[:1] == before[:1] and all(isinstance(n, int) for n in after[1:])
        )
    if node.op == "Expand":
        # Not to more than what there is for every token: an outer product stays in the step.
        after = _written(node.outputs[0]) or []
        sizes = [_size(shape) for shape in shapes.values()]
        return len(after) == len(shapes[first.name]) and _size(after) in sizes
    return node.op not in AXES or axes_of(node) is not None


def _is_one_part(node: gs.Node) -> bool:
    return node.op == "SequenceAt" and isinstance(node.inputs[1], gs.Constant)


def _is_projection(node: gs.Node, first: Shape) -> bool:
    """Return whether a product is one of tokens with a matrix, and what is added a vector."""
    if len(first) < 2 or len(node.inputs[1].shape or ()) != 2:
        return False
    plain = {"transA": 0, "alpha": 1.0, "beta": 1.0}
    return all(node.attrs.get(name, value) == value for name, value in plain.items())


def _worthwhile(nodes: list[gs.Node]) -> list[gs.Node]:
    """Return the nodes that compute something, and those that they read."""
    kept: list[gs.Node] = []
    needed: set[str] = set()
    for node in reversed(nodes):
        if node.op not in LAYOUT or any(o.name in needed for o in node.outputs):
            kept.insert(0, node)
            needed |= {t.name for t in node.inputs}
    return kept


def _hoist(graph: gs.Graph, scan: gs.Node, plan: _Plan) -> None:
    """Move the nodes before the Scan, which scans what the body still reads of them."""
    body, axes = scan.attrs["body"], _axes(scan)
    lifted = LiftedSteps(scan.name or scan.outputs[0].name, plan.scanned, plan.shapes)
    gone = set(map(id, plan.nodes))
    body.nodes[:] = [node for node in body.nodes if id(node) not in gone]
    for node in plan.nodes:
        lifted.add(node)
    for node in plan.nodes:
        if not any(node is made for made in lifted.nodes):
            node.inputs, node.outputs = [], []  # it is in no graph any more
    place = next(i for i, node in enumerate(graph.nodes) if node is scan)
    graph.nodes[place:place] = lifted.nodes
    for tensor in plan.read:
        tensor.shape = plan.shapes[tensor.name]
        scan.inputs.append(lifted.whole[tensor.name])
        body.inputs.append(tensor)
    _drop_unread(scan, axes + [0] * len(plan.read))


def _drop_unread(scan: gs.Node, axes: list[int]) -> None:
    """Write the axes of the scanned inputs, without inputs that the body reads no more."""
    body = scan.attrs["body"]
    read = {t.name for n in body.nodes for t in n.inputs} | {t.name for t in body.outputs}
    states = len(body.inputs) - len(axes)
    kept = [i for i, t in enumerate(body.inputs[states:]) if t.name in read]
    body.inputs = [*body.inputs[:states], *(body.inputs[states + i] for i in kept)]
    scan.inputs = [*scan.inputs[:states], *(scan.inputs[states + i] for i in kept)]
    scan.attrs["scan_input_axes"] = [axes[i] for i in kept]
    scan.attrs["num_scan_inputs"] = len(kept)


PASS = Pass(
    name="hoist_from_scans",
    stage="canonicalise",
    requires="the values in the bodies of Scans have known shapes",
    ensures="Scans compute little that depends on their tokens alone, besides outer products",
    run=run,
)
