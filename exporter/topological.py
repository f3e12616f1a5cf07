"""The nodes of a graph in the order of evaluation.

onnx-graphsurgeon's own sort does not see what the subgraph of an If, a Loop or a Scan reads of the
graph around it, and may put the node before what computes that.
"""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import TopologicalSorter

import onnx_graphsurgeon as gs

__all__ = ["sort"]


def sort(graph: gs.Graph) -> None:
    """Sort in place, subgraphs and functions as well.

    Raises:
        graphlib.CycleError: a node needs its own output.
    """
    for inner in (*graph.functions, *graph.subgraphs()):
        sort(inner)
    here = {id(node): node for node in graph.nodes}
    needs = {key: {id(m) for t in _read(node) for m in t.inputs} for key, node in here.items()}
    order = TopologicalSorter(needs).static_order()
    graph.nodes[:] = [here[key] for key in order if key in here]


def _read(node: gs.Node) -> Iterator[gs.Tensor]:
    """What a node and its subgraphs read."""
    yield from node.inputs
    for value in node.attrs.values():
        if isinstance(value, gs.Graph):
            yield from value.outputs
            for inner in value.nodes:
                yield from _read(inner)
