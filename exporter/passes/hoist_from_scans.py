"""Values that a Scan's step computes from its tokens alone -> computed before the Scan, of all.

    Scan over x_t: a = sigmoid(x_t W),         A = sigmoid(X W)
                   h = a h + x_t         ->    Scan over a_t, x_t: h = a_t h + x_t

Several factors of a state, and sums that have it several times, are joined before, see
``affine_update``. What is left in the body is a recurrence that recognition can
read; in a loop that is not linear, one product of all tokens takes the place of one for each. Outer
products stay in the step: there is one of them at a time. From a loop that is linear in its states
functions of outer products leave too, such as the exp(d A) - 1 of a zero-order hold, which
recognition could not factor.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs
from onnx import helper

from linexport.graph.contract import Pass, PassResult, rewrite_matches
from linexport.graph.copies import name_constants_apart
from linexport.graph.dims import Shape
from linexport.graph.edit import index_of, name_type
from linexport.graph.operators import ELEMENTWISE, LAYOUT, typed_like_output
from linexport.graph.partial_eval import Values
from linexport.graph.scan_body import has_directions, nonlinear_operator
from linexport.graph.tensors import known_shape
from linexport.loops.affine_update import join_updates
from linexport.loops.step_nodes import copy_given, drop_unread, leaves, scanned_axes
from linexport.loops.step_norms import as_layer_norms
from linexport.loops.vectorize_over_time import LiftedSteps, ScannedTokens

log = logging.getLogger(__name__)

FOLLOWED = frozenset(("Mul", "Div", "Exp", "Neg", "Identity", "Cast"))
"""Operators that recognition follows, of outer products as well."""


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
    read: list[gs.Variable]
    scanned: dict[str, ScannedTokens]
    shapes: dict[str, Shape]


def run(graph: gs.Graph) -> PassResult:
    """Take what depends on tokens alone, or on no token, out of every Scan."""
    scans = [n for n in graph.nodes if n.op == "Scan"]
    if not scans:
        return PassResult(False)
    known = Values.of_graph(graph)
    changed = [as_layer_norms(scan.attrs["body"], known) for scan in scans]
    # What is cast may be a constant, which must not wait for the value that says the type.
    changed += [_typed(node) for scan in scans for node in scan.attrs["body"].nodes]
    changed += map(join_updates, scans)
    return PassResult(rewrite_matches(graph, _plan, _hoist, log).modified or any(changed))


def _typed(node: gs.Node) -> bool:
    """Write the type that a node casts to, and that of a sum or product; see ``name_type``."""
    alike = typed_like_output(node.op)
    if alike and node.outputs[0].dtype is None:
        node.outputs[0].dtype = node.inputs[alike[0]].dtype
    if node.op == "Cast" and node.outputs[0].dtype is None:
        node.outputs[0].dtype = helper.tensor_dtype_to_np_dtype(node.attrs["to"])
    return name_type(node)


def _plan(graph: gs.Graph, node: gs.Node) -> _Plan | None:
    """Return what can leave a Scan; None where nothing can that computes something."""
    if node.op != "Scan" or has_directions(node):
        return None
    body, count = node.attrs["body"], node.attrs["num_scan_inputs"]
    inner = body.inputs[-count:]
    if any(t.shape is None for t in (*inner, *node.inputs[-count:])):
        return None
    found, shapes = _leaving(body, inner, outer=False)
    if nonlinear_operator(node) is None:
        every, shapes = _leaving(body, inner, outer=True)
        found = _with_functions(every, found)
    leaving = _worthwhile(found)
    if not leaving:
        return None
    moved = set(map(id, leaving))
    left = {t.name for n in body.nodes if id(n) not in moved for t in n.inputs}
    left |= {t.name for t in body.outputs}
    read = [o for n in leaving for o in n.outputs if o.name in left and o.name in shapes]
    scanned = zip(inner, node.inputs[-count:], scanned_axes(node), strict=True)
    return _Plan(leaving, read, {i.name: ScannedTokens(o, a) for i, o, a in scanned}, shapes)


def _leaving(
    body: gs.Graph, tokens: Sequence[gs.Tensor], outer: bool
) -> tuple[list[gs.Node], dict[str, Shape]]:
    """Return the nodes of a body that can leave, and the shapes of what tokens alone decide."""
    shapes: dict[str, Shape] = {t.name: list(known_shape(t)) for t in tokens}
    within = {t.name for t in (*body.inputs, *(o for n in body.nodes for o in n.outputs))}
    return [n for n in body.nodes if leaves(n, within, shapes, outer)], shapes


def _with_functions(every: list[gs.Node], plain: list[gs.Node]) -> list[gs.Node]:
    """Return the plain ones of all nodes, and functions of outer products with what they read."""
    kept = set(map(id, plain))
    outer = [node for node in every if id(node) not in kept]
    made = {o.name for node in outer for o in node.outputs}
    needed: set[str] = set()
    for node in reversed(outer):
        own = [t.name for t in node.inputs if t.name in made]
        function = node.op in ELEMENTWISE - FOLLOWED and len(own) == 1
        stored = all(t.name in made or isinstance(t, gs.Constant) for t in node.inputs)
        if (function and stored) or any(o.name in needed for o in node.outputs):
            kept.add(id(node))
            needed.update(own)
    grown = {o.name for n in outer if id(n) in kept for o in n.outputs}
    for node in outer:  # products with what has left are no larger than that
        if any(t.name in grown for t in node.inputs) and node.op in ELEMENTWISE:
            kept.add(id(node))
            grown |= {o.name for o in node.outputs}
    return [node for node in every if id(node) in kept]


def _worthwhile(nodes: list[gs.Node]) -> list[gs.Node]:
    """Return the nodes that compute something, and those that they read."""
    kept: list[gs.Node] = []
    needed: set[str] = set()
    for node in reversed(nodes):
        # What computes nothing is by itself no reason to leave the body.
        if node.op not in LAYOUT or any(o.name in needed for o in node.outputs):
            kept.insert(0, node)
            needed |= {t.name for t in node.inputs}
    return kept


def _hoist(graph: gs.Graph, scan: gs.Node, plan: _Plan) -> None:
    """Move the nodes before the Scan, which scans what the body still reads of them."""
    body, axes = scan.attrs["body"], scanned_axes(scan)
    lifted = LiftedSteps(scan.name or scan.outputs[0].name, plan.scanned, plan.shapes)
    lifted.take(body, plan.nodes)
    name_constants_apart(lifted.nodes, graph, lifted.stem)
    place = index_of(graph, scan)
    graph.nodes[place:place] = lifted.nodes
    for tensor in plan.read:
        tensor.shape = plan.shapes[tensor.name]
        scan.inputs.append(lifted.whole[tensor.name])
        body.inputs.append(tensor)
    copy_given(body)
    drop_unread(scan, axes + [0] * len(plan.read))


PASS = Pass(
    name="hoist_from_scans",
    stage="canonicalise",
    requires="the values in the bodies of Scans have known shapes",
    ensures="Scans compute little that depends on their tokens alone, besides outer products",
    run=run,
)
