"""SplitToSequence read only at fixed places by SequenceAt -> Split.

torch exports ``chunk``, ``split`` and ``unbind`` through a sequence. A sequence hides the shapes of
its members from every later pass, and several runtimes do not take one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.contract import NoMatchError, Pass, PassResult, rewrite_matches
from linexport.graph.edit import is_output, producer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Parts:
    """The sizes of the parts of a sequence, and the nodes that take one of them, with its place."""

    sizes: np.ndarray
    taken: list[tuple[gs.Node, int]]


def run(graph: gs.Graph) -> PassResult:
    """Split every sequence whose members are known, in the bodies of loops as well."""
    bodies = [a for n in graph.nodes for a in n.attrs.values() if isinstance(a, gs.Graph)]
    inner = [run(body).modified for body in bodies]
    outer = rewrite_matches(graph, _match, _split, log)
    return replace(outer, modified=outer.modified or any(inner))


def _match(graph: gs.Graph, node: gs.Node) -> _Parts | None:
    # A sequence of constants has been folded by now: what is left of it has no outputs.
    if node.op != "SplitToSequence" or not node.outputs:
        return None
    sequence = node.outputs[0]
    sizes = _sizes(node)
    if sizes is None:
        raise NoMatchError("the sizes of its parts are not known")
    places = [_constant(r.inputs[1]) if r.op == "SequenceAt" else None for r in sequence.outputs]
    if any(place is None for place in places):
        raise NoMatchError("not only SequenceAt at known places reads its sequence")
    if is_output(graph, sequence):
        raise NoMatchError("its sequence is an output of the graph")
    if node.attrs.get("keepdims", 1) == 0:
        raise NoMatchError("its parts lose the axis")
    indices = [int(place) % len(sizes) for place in places if place is not None]
    return _Parts(sizes, list(zip(sequence.outputs, indices, strict=True)))


def _split(graph: gs.Graph, node: gs.Node, parts: _Parts) -> None:
    name, data, axis = node.outputs[0].name, node.inputs[0], node.attrs.get("axis", 0)
    outputs = [gs.Variable(f"{name}_{i}") for i in range(len(parts.sizes))]
    taken: set[int] = set()
    for consumer, index in parts.taken:
        output = consumer.outputs[0]
        consumer.outputs.clear()
        consumer.inputs.clear()
        if index not in taken:
            taken.add(index)
            outputs[index] = output
        else:  # a part that is read twice
            copy = gs.Node("Identity", inputs=[outputs[index]], outputs=[output])
            graph.nodes.append(copy)
    node.outputs.clear()
    node.inputs.clear()
    sizes = gs.Constant(f"{name}_sizes", parts.sizes.astype(np.int64))
    graph.nodes.append(gs.Node("Split", node.name, {"axis": axis}, [data, sizes], outputs))


def _sizes(node: gs.Node) -> np.ndarray | None:
    """Return the sizes of the parts, given as a list or as one size for all but the last."""
    given = _constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if given is None or given.ndim == 1:
        return given
    shape = node.inputs[0].shape
    total = shape[node.attrs.get("axis", 0)] if shape else None
    if not isinstance(total, int):
        return None
    size = int(given)
    return np.asarray([min(size, total - start) for start in range(0, total, size)])


def _constant(tensor: gs.Tensor) -> np.ndarray | None:
    if isinstance(tensor, gs.Constant):
        return np.asarray(tensor.values)
    node = producer(tensor, "Constant")
    if node is not None and "value" in node.attrs:
        return np.asarray(node.attrs["value"].values)
    return None


PASS = Pass(
    name="split_sequence",
    stage="canonicalise",
    ensures="no sequence of known parts is read only at known places",
    run=run,
)
