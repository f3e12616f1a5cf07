"""Causal linexport nodes without a past -> the same nodes with past inputs and present outputs.

    LinearAttention(q, k, v)      becomes  past_state_i, past_normalizer_i -> present_...
    StabilizedExp(q, k)           becomes  past_key_max_i -> present_key_max_i
    CausalConvWithState(x, w)     becomes  past_conv_i -> present_conv_i
    LinearAttention(.., 0 c)      becomes  past_state_i c
    LinearAttention(.., S)        becomes  past_state_i_begun ? past_state_i : S

and so on: which states a node has, its op declares. One graph then serves prefill (the initial
past, any T) and decode (T = 1). Whether the model as a whole streams by these states is for
validation to decide, not for this pass.
"""

from __future__ import annotations

import logging
import math
from functools import partial

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph import sequence_axis
from linexport.graph.contract import Pass, PassResult
from linexport.graph.edit import is_read
from linexport.graph.op_nodes import Start, start_of, state_type, view_of
from linexport.graph.partial_eval import Values
from linexport.graph.tensors import known_shape
from linexport.match.emit.layout import element_type
from linexport.passes import first_call
from linexport.plugins.ops.op import DOMAIN, StatePort
from linexport.plugins.ops.registry import all_ops

log = logging.getLogger(__name__)


def run(graph: gs.Graph) -> PassResult:
    """Expose the states of every causal node.

    Pasts that the graph computes of tokens are left alone.
    """
    index, taken, modified = 0, set(graph.tensors()), False
    known, tokens = Values.of_graph(graph), sequence_axis.symbol(graph)
    for node in list(graph.nodes):
        if node.domain != DOMAIN:
            continue
        op = all_ops().get(node.op)
        ports = op.states(view_of(node, op)) if op else ()
        if op is None or not ports:
            continue
        starts = [_beginning(graph, node, port, known, tokens) for port in ports]
        if None in starts:
            log.debug("%s %r is left as it is: the graph provides its past", node.op, node.name)
            continue
        while any(
            f"{side}_{port.name}_{index}" in taken for port in ports for side in first_call.SIDES
        ):
            index += 1
        for port, start in zip(ports, starts, strict=True):
            if start is not None:
                _attach(graph, node, port, start, index, state_type(node, op, port), known)
        log.info("%s %r: state %d is an input and an output", node.op, node.name, index)
        index, modified = index + 1, True
    return PassResult(modified)


def _beginning(
    graph: gs.Graph, node: gs.Node, port: StatePort, known: Values, tokens: str | None
) -> Start | None:
    """Return where a state begins with what its op begins with, or with what is of no token.

    None where the graph provides another past, or carries it already.
    """
    zero = start_of(node, port, known, known.is_zero) if port.initial_value == 0 else None
    past = node.inputs[port.past] if len(node.inputs) > port.past else gs.Variable.empty()
    if zero is not None or past.is_empty():
        return zero or Start(node, port.past)
    if tokens is None or first_call.is_carried(graph, past):
        return None
    of_no_token = partial(first_call.is_of_no_token, tokens=tokens, known=known)
    return start_of(node, port, known, of_no_token)


def _in_place_of(graph: gs.Graph, past: gs.Variable, zeros: gs.Tensor) -> gs.Tensor:
    """Return a past in the shape and the type of the zeros that it takes the place of."""
    sizes = list(zeros.shape or ())[1:]
    found: gs.Tensor = past
    if not all(isinstance(n, int) for n in sizes) or math.prod(sizes) != math.prod(
        known_shape(past)[1:]
    ):
        return past
    if sizes != list(known_shape(past)[1:]):
        target = gs.Constant(f"{past.name}/shape", np.asarray([0, *sizes], np.int64))
        found = gs.Variable(f"{past.name}/reshaped", past.dtype, [known_shape(past)[0], *sizes])
        graph.nodes.append(gs.Node("Reshape", found.name, {}, [past, target], [found]))
    if zeros.dtype is not None and zeros.dtype != past.dtype:
        cast = gs.Variable(f"{past.name}/cast", zeros.dtype, found.shape)
        to = {"to": element_type(np.dtype(zeros.dtype))}
        graph.nodes.append(gs.Node("Cast", cast.name, to, [found], [cast]))
        found = cast
    return found


def _attach(
    graph: gs.Graph,
    node: gs.Node,
    port: StatePort,
    start: Start,
    index: int,
    dtype: object,
    known: Values,
) -> None:
    shape = [known_shape(node.inputs[0])[0], *port.sizes]
    while len(node.inputs) <= port.past:
        node.inputs.append(gs.Variable.empty())
    past = gs.Variable(f"past_{port.name}_{index}", dtype=dtype, shape=shape)
    given = start.tensor
    own: gs.Tensor = past if given.is_empty() else _in_place_of(graph, past, given)
    if not given.is_empty() and not known.is_zero(given):
        begun = first_call.flag(graph, f"{port.name}_{index}", shape[0])
        own = first_call.chosen(graph, begun, own, given)
    start.put(own)
    graph.inputs.append(past)
    while len(node.outputs) <= port.present:
        node.outputs.append(gs.Variable.empty())
    output = node.outputs[port.present]
    state = gs.Variable(f"present_{port.name}_{index}", dtype, shape)
    node.outputs[port.present] = state
    graph.outputs.append(state)
    if not output.is_empty() and is_read(graph, output):
        # Nodes of the model read it as before.
        copy = gs.Node("Identity", f"{node.name}/{state.name}", inputs=[state], outputs=[output])
        graph.nodes.append(copy)


PASS = Pass(
    name="expose_past_present",
    stage="state",
    requires="the query, key and value of linexport nodes have known shapes",
    ensures="causal linexport nodes take their pasts from inputs and give their presents",
    run=run,
)
