"""Nodes of a graph replaced by others that were shown to compute the same.

Both run on their own, in ONNX Runtime, on random inputs of two sizes; a difference above rounding
refuses the replacement. Nodes alike in everything but their names are compared once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import onnxruntime
from onnx import helper

from linexport.graph.contract import NoMatchError, PassResult, rewrite_matches
from linexport.graph.edit import is_output
from linexport.graph.monomials import parse
from linexport.graph.run_subgraph import NotRunnableError, session, size_value, symbols_in
from linexport.graph.tensors import computed_value, known_shape

DOMAIN = "com.microsoft"

TOLERANCE = 1e-5
"""Difference allowed, of the largest value: sums of float32 in another order differ by 1e-6."""

SIZES = (3, 1, 2, 5)
"""Given to the dynamic sizes in turn; the second comparison begins with the second."""

COMPARISONS = 2

SMALL = 16
"""Constants of up to so many values are compared by value, to tell whether nodes are alike."""


@dataclass(frozen=True)
class Substitution:
    """Nodes and what takes their place.

    Attributes:
        old: nodes of the graph, in the order of evaluation.
        new: nodes that are not in the graph yet.
        inputs: values that either reads, constants and shapes of a Reshape aside.
        results: a value that ``old`` computes, and the one of ``new`` that takes its place.
        shared: nodes of the graph that both read from, and that stay; ``inputs`` are theirs.
    """

    old: Sequence[gs.Node]
    new: Sequence[gs.Node]
    inputs: Sequence[gs.Tensor]
    results: Sequence[tuple[gs.Variable, gs.Variable]]
    shared: Sequence[gs.Node] = ()


Match = Callable[[gs.Graph, gs.Node], Substitution | None]
"""Returns what takes a node's place, None where it is not a candidate; see ``rewrite_matches``."""


def substitute_matches(graph: gs.Graph, match: Match, log: logging.Logger) -> PassResult:
    """Prove and make the substitution of every node that matches.

    Args:
        graph: changed in place.
        match: see ``Match``.
        log: of the pass's module.
    """
    proofs: dict[str, str] = {}

    def proven(graph: gs.Graph, node: gs.Node) -> Substitution | None:
        change = match(graph, node)
        if change is None:
            return None
        key = _key(change)
        reason = _still_used(graph, change) or proofs.get(key)
        if reason is None:
            reason = proofs[key] = _difference(graph, change)
        if reason:
            for new in change.new:
                new.inputs.clear()
            raise NoMatchError(reason)
        return change

    return rewrite_matches(graph, proven, _make, log)


def _make(graph: gs.Graph, _: gs.Node, change: Substitution) -> None:
    """Let new nodes compute the values that old ones computed."""
    for old in change.old:
        old.inputs.clear()
        old.outputs.clear()
    for result, computed in change.results:
        [maker] = computed.inputs
        maker.outputs = [result if t is computed else t for t in maker.outputs]
    graph.nodes.extend(change.new)
    if all(d.domain != DOMAIN for d in graph.import_domains or ()):
        graph.import_domains = [*(graph.import_domains or ()), helper.make_opsetid(DOMAIN, 1)]


def _still_used(graph: gs.Graph, change: Substitution) -> str | None:
    """Return which value of the old nodes would still be needed; None where there is none."""
    inside, results = {id(n) for n in change.old}, {id(old) for old, _ in change.results}
    for old in change.old:
        for tensor in old.outputs:
            outside = is_output(graph, tensor) or any(id(n) not in inside for n in tensor.outputs)
            if outside and id(tensor) not in results:
                return f"{tensor.name} is used elsewhere, too"
    return None


def _key(change: Substitution) -> str:
    """Return text that is equal for substitutions that compute the same of like inputs."""
    known: dict[int, str] = {}

    def name(tensor: gs.Tensor) -> str:
        if isinstance(tensor, gs.Constant):
            small = np.prod(tensor.shape) <= SMALL
            return f"{tensor.dtype}{tensor.shape}{tensor.values.tolist() if small else ''}"
        return "-" if tensor.is_empty() else known.setdefault(id(tensor), f"v{len(known)}")

    parts = [f"{name(t)} {t.dtype} {t.shape}" for t in change.inputs]
    for one in (*change.shared, *change.old, *change.new):
        attributes = sorted((key, str(value)) for key, value in one.attrs.items())
        ends = [[name(t) for t in side] for side in (one.inputs, one.outputs)]
        parts.append(f"{one.domain} {one.op} {attributes} {ends}")
    return "\n".join([*parts, *(f"{name(a)} = {name(b)}" for a, b in change.results)])


def _difference(graph: gs.Graph, change: Substitution) -> str:
    """Return how both differ, or why they cannot be compared; empty where they are equal."""
    imports = {d.domain: d.version for d in graph.import_domains or ()}
    imports |= {"": graph.opset, DOMAIN: 1}
    shapes = {
        n.inputs[1].name: n.outputs[0]
        for n in change.old
        if n.op == "Reshape" and isinstance(n.inputs[1], gs.Variable)
    }
    given = [*change.inputs, *(gs.Variable(n, np.int64, [f"{n}/rank"]) for n in shapes)]
    if any(t.shape is None for t in (*change.inputs, *shapes.values())):
        return "the shape of an input is not known"
    try:
        for old, new in change.results:
            both = [
                _opened(given, [*change.shared, *nodes], result, imports)
                for nodes, result in ((change.old, old), (change.new, new))
            ]
            for first in range(COMPARISONS):
                expected, got = (s.run(None, _feeds(s, change, shapes, first))[0] for s in both)
                problem = _compared(expected, got)
                if problem:
                    return f"{old.name} would {problem}"
    except NotRunnableError as error:
        return str(error)
    except Exception as error:
        logging.getLogger(__name__).info("a replacement does not run: %s", error)
        return "one of both does not run by itself"
    return ""


def _compared(expected: np.ndarray, got: np.ndarray) -> str:
    if got.shape != expected.shape:
        return f"have the shape {got.shape} instead of {expected.shape}"
    worst = np.abs(got.astype(np.float64) - expected).max(initial=0.0)
    if not worst <= TOLERANCE * np.abs(expected).max(initial=0.0):
        return f"differ by {worst:.1e}"
    return ""


def _feeds(
    opened: Any, change: Substitution, shapes: Mapping[str, gs.Variable], first: int
) -> dict[str, np.ndarray]:
    """Return random inputs, and the shapes that Reshape takes; the same for both sides."""
    random = np.random.default_rng(first)
    tensors = [*change.inputs, *shapes.values()]
    atoms = {name for t in tensors for size in known_shape(t) for name in symbols_in(parse(size))}
    chosen = {s: SIZES[(first + place) % len(SIZES)] for place, s in enumerate(sorted(atoms))}
    feeds = {}
    for tensor in change.inputs:
        shape = [size_value(parse(size), chosen) for size in known_shape(tensor)]
        feeds[tensor.name] = random.standard_normal(shape).astype(tensor.dtype)
    for name, reshaped in shapes.items():
        sizes = [size_value(parse(size), chosen) for size in known_shape(reshaped)]
        feeds[name] = np.asarray(sizes, np.int64)
    read = {i.name for i in opened.get_inputs()}
    return {name: value for name, value in feeds.items() if name in read}


def _opened(
    given: Sequence[gs.Tensor],
    nodes: Sequence[gs.Node],
    result: gs.Variable,
    imports: Mapping[str, int],
) -> onnxruntime.InferenceSession:
    """Open copies of nodes on their own: a graph that is exported edits its tensors."""
    made: dict[str, gs.Variable] = {}

    def copied(tensor: gs.Variable) -> gs.Variable:
        if tensor.is_empty():
            return gs.Variable.empty()
        copy = gs.Variable(tensor.name, tensor.dtype, tensor.shape)
        return made.setdefault(tensor.name, copy)

    stored: dict[str, gs.Constant] = {}

    def read(tensor: gs.Tensor) -> gs.Tensor:
        if isinstance(tensor, gs.Constant):
            return stored.setdefault(tensor.name, gs.Constant(tensor.name, tensor.values))
        return copied(computed_value(tensor))

    inputs = [read(t) for t in given]
    copies = [
        gs.Node(
            n.op,
            n.name,
            dict(n.attrs),
            [read(t) for t in n.inputs],
            [copied(t) for t in n.outputs],
            domain=n.domain,
        )
        for n in nodes
    ]
    return session(inputs, copies, made[result.name], imports)
