"""Scan over tokens, from states of zero -> the same Scan with past inputs and present outputs.

    Scan(0, x)        becomes      past_scan_0_0 -> present_scan_0_0

A loop that is no linear attention streams all the same: a delta rule token by token, an LSTM.
"""

from __future__ import annotations

import logging

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph import sequence_axis
from linexport.graph.states import SCAN
from linexport.passes.contract import NoMatchError, Pass, PassResult, rewrite_matches
from linexport.recognise.values import Values

log = logging.getLogger(__name__)

Shapes = list[list[int | str]]


def run(graph: gs.Graph) -> PassResult:
    """Expose the states of every Scan over the tokens."""
    tokens, known = sequence_axis.symbol(graph), Values.of_graph(graph)
    nodes = [n for n in graph.nodes if n.op == "Scan"]

    def match(graph: gs.Graph, node: gs.Node) -> Shapes | None:
        return _shapes(node, tokens, known) if node.op == "Scan" and node.inputs else None

    def replace(graph: gs.Graph, node: gs.Node, shapes: Shapes) -> None:
        place = next(i for i, n in enumerate(nodes) if n is node)
        for i, shape in enumerate(shapes):
            dtype, last = node.attrs["body"].inputs[i].dtype, node.outputs[i]
            past = gs.Variable(f"{SCAN[0]}{place}_{i}", dtype, shape)
            present = gs.Variable(f"{SCAN[1]}{place}_{i}", dtype, shape)
            node.inputs[i], node.outputs[i] = past, present
            graph.inputs.append(past)
            graph.outputs.append(present)
            # The model's own use of the last state stays what it is.
            graph.nodes.append(gs.Node("Identity", inputs=[present], outputs=[last]))

    return rewrite_matches(graph, match, replace, log)


def _shapes(node: gs.Node, tokens: str | None, known: Values) -> Shapes | None:
    """Return the shapes of the states of a Scan that could be an artifact's."""
    count = node.attrs["num_scan_inputs"]
    states = node.inputs[:-count]
    if not states:
        return None
    if tokens is None or sequence_axis.scanned(node) != tokens:
        raise NoMatchError("it is not over the tokens")
    if any(any(node.attrs.get(f"scan_{side}_directions") or ()) for side in ("input", "output")):
        raise NoMatchError("it begins at the last token")
    if not all(map(known.is_zero, states)):
        raise NoMatchError("its states do not begin with zeros")
    inner = node.attrs["body"].inputs[: len(states)]
    shapes = [list(tensor.shape or ()) for tensor in inner]
    for tensor, shape in zip(inner, shapes, strict=True):
        batch = shape and isinstance(shape[0], str) and shape[0] != tokens
        if not batch or not all(isinstance(size, int) for size in shape[1:]):
            raise NoMatchError(f"a state has the shape {shape}; expected a batch and numbers")
        if tensor.dtype not in (np.float32, np.float16):
            raise NoMatchError(f"a state is of type {tensor.dtype}")
    return shapes


PASS = Pass(
    name="expose_scan_states",
    stage="state",
    requires="the states in the bodies of Scans have known shapes",
    ensures="every Scan over tokens from zero takes its past from an input and gives its present",
    run=run,
)
