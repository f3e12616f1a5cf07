"""Weights of pairs of tokens that are a product added to something else -> two sums over keys.

    (a + b) v            ->    a v + b v                       and (a + b) / d v, d of each query
    sum_s (a_ts + b_ts)  ->    sum_s a_ts + sum_s b_ts

where a is a product of queries and keys and b is none, such as weights of a softmax over the last
tokens, but depends on data. On the way to the sums, both may be masked, cast, multiplied and
divided: all of that is linear. Each sum is then found, and streams, by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.contract import Pass, PassResult
from linexport.graph.edit import is_output
from linexport.graph.monomials import ONE
from linexport.graph.operators import AXES_ONLY
from linexport.graph.partial_eval import stated_sizes
from linexport.graph.shapes import completed_shapes
from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.terms import Form, Leaf
from linexport.match.forms.token_sizes import of_positions

log = logging.getLogger(__name__)

SUMS = {"MatMul": (0,), "Einsum": (0, 1), "ReduceSum": (0,)}
"""Operators that sum over keys, with the places of weights among their inputs."""

LINEAR = {
    **dict.fromkeys(("Cast", "Div", "Identity", "Neg", "Trilu", *AXES_ONLY), (0,)),
    **{"Mul": (0, 1), "Where": (1, 2)},
}
"""Linear operators, with the places of weights among their inputs."""


@dataclass
class _Split:
    """A sum of weights, and what reads it.

    Attributes:
        node: the sum.
        readers: the nodes between it and sums over keys, these included; each with the place of the
            weights among its inputs.
        divided: whether they are divided on the way by a number of each query.
    """

    node: gs.Node
    readers: list[tuple[gs.Node, int]] = field(default_factory=list)
    divided: bool = False


def run(graph: gs.Graph) -> PassResult:
    """Split every such sum."""
    modified = False
    with completed_shapes(graph):
        while True:
            found = next(_splits(graph), None)
            if found is None:
                return PassResult(modified)
            log.info("splitting weights %r", found.node.name)
            _write(graph, found)
            graph.cleanup().toposort()
            modified = True


def _splits(graph: gs.Graph) -> Iterator[_Split]:
    evaluator: Evaluator | None = None
    positions = of_positions(graph)
    for node in graph.nodes:
        added = _addends(node)
        if added is None or not all(map(_is_pair, added)):
            continue
        if any(tensor.name in positions for tensor in added):
            continue  # a bias by distance has no sum over keys that is found
        found = _Split(node)
        if not _follow(graph, node.outputs[0], found):
            continue
        evaluator = evaluator or Evaluator(graph)
        forms = [evaluator.form(tensor) for tensor in added]
        if sum(map(_is_product, forms)) == 1 and not any(map(_is_nothing, forms)):
            yield found


def _addends(node: gs.Node) -> tuple[gs.Tensor, gs.Tensor] | None:
    if node.op in ("Add", "Sub") and len(node.inputs) == 2:
        return node.inputs[0], node.inputs[1]
    return (node.inputs[1], node.inputs[2]) if node.op == "Where" and node.inputs else None


def _is_pair(tensor: gs.Tensor) -> bool:
    """Return whether the last two axes of a value are of one dynamic size."""
    sizes = stated_sizes(tensor) or []
    return len(sizes) > 1 and sizes[-1] == sizes[-2] and sizes[-1].known is None


def _is_product(form: Form | None) -> bool:
    """Return whether a value of pairs is made of values of each query and of each key."""
    if form is None or not form.terms or len(form.dims) < 2:
        return False
    rows, columns = set(form.dims[-2]), set(form.dims[-1])
    leaves = [f for term in form.terms for f in term.of(Leaf)]
    mixed = any(f.axes & rows and f.axes & columns for f in leaves)
    return not mixed and any(
        any(f.axes & rows for f in term.of(Leaf)) and any(f.axes & columns for f in term.of(Leaf))
        for term in form.terms
    )


def _is_nothing(form: Form | None) -> bool:
    """Return whether a value is zero: where it is chosen, the other one is masked."""
    return form is not None and form.scalar == 0


def _follow(graph: gs.Graph, tensor: gs.Tensor, found: _Split) -> bool:
    """Note the nodes from weights to sums over keys; returns whether these are all there are."""
    if is_output(graph, tensor) or not tensor.outputs:
        return False
    for node in tensor.outputs:
        places = [i for i, t in enumerate(node.inputs) if t is tensor]
        if len(places) != 1 or any(node is other for other, _ in found.readers):
            return False
        (place,) = places
        if place in SUMS.get(node.op, ()):
            if found.divided and not _keeps_rows(node):
                return False
            found.readers.append((node, place))
        elif place in LINEAR.get(node.op, ()) and _is_linear(node, place):
            found.readers.append((node, place))
            found.divided |= _is_of_queries(node)
            if not _follow(graph, node.outputs[0], found):
                return False
        else:
            return False
    return True


def _keeps_rows(node: gs.Node) -> bool:
    """Return whether a sum over keys leaves the queries in the axis before the last."""
    return node.op == "MatMul" or (node.op == "ReduceSum" and bool(node.attrs.get("keepdims", 1)))


def _is_linear(node: gs.Node, place: int) -> bool:
    """Return whether a choice is between weights and zero, and a cast to floating numbers."""
    if node.op == "Cast":
        return np.dtype(node.outputs[0].dtype).kind == "f"
    return node.op != "Where" or _is_zero(node.inputs[3 - place])


def _is_zero(tensor: gs.Tensor) -> bool:
    return isinstance(tensor, gs.Constant) and not np.asarray(tensor.values).any()


def _write(graph: gs.Graph, found: _Split) -> None:
    node, stem = found.node, f"{found.node.name}/split"
    joins = "Sub" if node.op == "Sub" else "Add"
    sides = {node.outputs[0].name: _parts(graph, node, stem)}
    divisors: dict[str, list[gs.Tensor]] = {node.outputs[0].name: []}
    for number, (reader, place) in enumerate(found.readers):
        given, own = reader.inputs[place], reader.outputs[0]
        if _is_of_queries(reader):
            # (a / d) v = (a v) / d: the sums are then found without the divisor.
            sides[own.name] = sides[given.name]
            divisors[own.name] = [*divisors[given.name], reader.inputs[1]]
            continue
        made = []
        for side, part in enumerate(sides[given.name]):
            inputs = [part if i == place else t for i, t in enumerate(reader.inputs)]
            result = gs.Variable(f"{stem}/{number}/{side}", own.dtype, own.shape)
            name = f"{reader.name}/{side}"
            graph.nodes.append(gs.Node(reader.op, name, dict(reader.attrs), inputs, [result]))
            made.append(result)
        sides[own.name], divisors[own.name] = (made[0], made[1]), divisors[given.name]
        if reader.op in SUMS:
            reader.outputs.clear()
            steps = [(joins, made[1]), *(("Div", d) for d in divisors[given.name])]
            x = made[0]
            for step, (op, other) in enumerate(steps):
                last = step + 1 == len(steps)
                name = f"{stem}/{number}/{op}_{step}"
                result = own if last else gs.Variable(name, own.dtype, own.shape)
                graph.nodes.append(gs.Node(op, name, {}, [x, other], [result]))
                x = result


def _is_of_queries(node: gs.Node) -> bool:
    """Return whether a node divides weights by a number of each query."""
    sizes = stated_sizes(node.inputs[1]) if node.op == "Div" else None
    return sizes is not None and sizes[-1:] == [ONE] and len(sizes) > 1


def _parts(graph: gs.Graph, node: gs.Node, stem: str) -> tuple[gs.Tensor, gs.Tensor]:
    """Return what is added up."""
    if node.op != "Where":
        return node.inputs[0], node.inputs[1]
    truth, a, b = node.inputs
    made = []
    for side, inputs in enumerate(((truth, a, None), (truth, None, b))):
        ones = [1] * len(stated_sizes(node.outputs[0]) or ())
        zero = gs.Constant(f"{stem}/{side}/zero", np.zeros(ones, np.dtype(a.dtype)))
        result = gs.Variable(f"{stem}/{side}", node.outputs[0].dtype, node.outputs[0].shape)
        given = [zero if t is None else t for t in inputs]
        graph.nodes.append(gs.Node("Where", f"{stem}/{side}", {}, given, [result]))
        made.append(result)
    return made[0], made[1]


PASS = Pass(
    name="split_weights",
    stage="canonicalise",
    ensures="no sum over keys has weights that are a product added to something else",
    run=run,
)
