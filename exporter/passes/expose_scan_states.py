"""Scan over tokens, from states of no token -> the same Scan with past inputs and present outputs.

    Scan(0, x)        becomes      past_scan_0_0 -> present_scan_0_0
    Scan(h_0, x)      becomes      Scan(past_scan_0_begun ? past_scan_0_0 : h_0, x)

A loop that is not linear attention streams all the same: a delta rule token by token, an LSTM. h_0
follows from weights and the size of the batch; past_scan_0_begun is 0 before the first call.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph import sequence_axis
from linexport.graph.contract import NoMatchError, Pass, PassResult, rewrite_matches
from linexport.graph.dims import Shape
from linexport.graph.partial_eval import Values
from linexport.graph.states import SCAN
from linexport.passes import first_call

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _States:
    """The states of a Scan.

    Attributes:
        shapes: of each, with the batch first.
        given: numbers of those that begin with something else than zeros.
    """

    shapes: list[Shape]
    given: list[int]


def run(graph: gs.Graph) -> PassResult:
    """Expose the states of every Scan over the tokens."""
    tokens, known = sequence_axis.symbol(graph), Values.of_graph(graph)
    nodes = [n for n in graph.nodes if n.op == "Scan"]

    def match(graph: gs.Graph, node: gs.Node) -> _States | None:
        return _states(node, tokens, known) if node.op == "Scan" and node.inputs else None

    def replace(graph: gs.Graph, node: gs.Node, states: _States) -> None:
        place = next(i for i, n in enumerate(nodes) if n is node)
        batch = states.shapes[0][0]
        begun = first_call.flag(graph, f"scan_{place}", batch) if states.given else None
        for i, shape in enumerate(states.shapes):
            dtype, last = node.attrs["body"].inputs[i].dtype, node.outputs[i]
            past = gs.Variable(f"{SCAN[0]}{place}_{i}", dtype, shape)
            present = gs.Variable(f"{SCAN[1]}{place}_{i}", dtype, shape)
            if begun is not None and i in states.given:
                node.inputs[i] = first_call.chosen(graph, begun, past, node.inputs[i])
            else:
                node.inputs[i] = past
            node.outputs[i] = present
            graph.inputs.append(past)
            graph.outputs.append(present)
            # Nodes of the model read the last state as before.
            graph.nodes.append(gs.Node("Identity", inputs=[present], outputs=[last]))

    return rewrite_matches(graph, match, replace, log)


def _states(node: gs.Node, tokens: str | None, known: Values) -> _States | None:
    """Return the states of a Scan that could be an artifact's."""
    count = node.attrs["num_scan_inputs"]
    states = node.inputs[:-count]
    if not states:
        return None
    if tokens is None or sequence_axis.scanned(node) != tokens:
        raise NoMatchError("it is not over the tokens")
    if any(any(node.attrs.get(f"scan_{side}_directions") or ()) for side in ("input", "output")):
        raise NoMatchError("it begins at the last token")
    given = [i for i, state in enumerate(states) if not known.is_zero(state)]
    if not all(first_call.is_of_no_token(states[i], tokens, known) for i in given):
        raise NoMatchError("its states begin with what depends on tokens")
    inner = node.attrs["body"].inputs[: len(states)]
    shapes: list[Shape] = [list(tensor.shape or ()) for tensor in inner]
    for tensor, shape in zip(inner, shapes, strict=True):
        batch = shape and isinstance(shape[0], str) and shape[0] != tokens
        if not batch or not all(isinstance(size, int) for size in shape[1:]):
            raise NoMatchError(f"a state has the shape {shape}; expected a batch and numbers")
        if tensor.dtype not in (np.float32, np.float16):
            raise NoMatchError(f"a state is of type {tensor.dtype}")
    return _States(shapes, given)


PASS = Pass(
    name="expose_scan_states",
    stage="state",
    requires="the states in the bodies of Scans have known shapes",
    ensures="Scans over tokens take their past from inputs and give their present",
    run=run,
)
