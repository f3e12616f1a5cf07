"""Causal linexport nodes without a past -> the same nodes with past inputs and present outputs.

    LinearAttention(q, k, v)      becomes  past_state_i, past_normalizer_i -> present_...
    StabilizedExp(q, k)           becomes  past_key_max_i -> present_key_max_i
    CausalConvWithState(x, w)     becomes  past_conv_i -> present_conv_i
    LinearAttention(.., 0 c)      becomes  past_state_i c

and so on: which states a node has, its op declares. One graph then serves prefill (the initial
past, any T) and decode (T = 1). Whether the model as a whole streams by these states is for
validation to decide, not for this pass.
"""

from __future__ import annotations

import logging
import math

import numpy as np
import onnx_graphsurgeon as gs

from linexport.errors import OpError
from linexport.graph.contract import Pass, PassResult
from linexport.graph.edit import is_read, producer
from linexport.graph.partial_eval import Values
from linexport.graph.tensors import known_shape
from linexport.match.emit.layout import element_type
from linexport.plugins.ops.op import ACTIVATION, DOMAIN, Node, Op, StatePort
from linexport.plugins.ops.registry import all_ops

log = logging.getLogger(__name__)

SIDES = ("past", "present")


def run(graph: gs.Graph) -> PassResult:
    """Expose the states of every causal node; pasts that the graph provides are left alone."""
    index, taken, modified = 0, set(graph.tensors()), False
    known = Values.of_graph(graph)
    for node in list(graph.nodes):
        if node.domain != DOMAIN:
            continue
        op = all_ops().get(node.op)
        ports = op.states(_view(node, op)) if op else ()
        if op is None or not ports:
            continue
        if any(_given(node, port, known) for port in ports):
            log.debug("%s %r is left as it is: the graph provides its past", node.op, node.name)
            continue
        while any(f"{side}_{port.name}_{index}" in taken for port in ports for side in SIDES):
            index += 1
        for port in ports:
            element = op.element_type(op.input_names[port.past], node.attrs)
            dtype = node.inputs[0].dtype if element == ACTIVATION else np.dtype(element)
            _attach(graph, node, port, index, dtype, known)
        log.info("%s %r: state %d is an input and an output", node.op, node.name, index)
        index, modified = index + 1, True
    return PassResult(modified)


def _view(node: gs.Node, op: Op) -> Node:
    formal = op.input_names
    given = {n: t for n, t in zip(formal, node.inputs, strict=False) if not t.is_empty()}
    for name, tensor in given.items():
        if tensor.shape is None:
            raise OpError(f"{op.name} {node.name!r}: the shape of its input {name} is unknown.")
    present = tuple(name if name in given else "" for name in formal)
    return Node(node.op, node.attrs, present, {n: tuple(known_shape(t)) for n, t in given.items()})


def _given(node: gs.Node, port: StatePort, known: Values) -> bool:
    """Return whether a node begins with another state than its op does by itself."""
    return _beginning(node, port, known) is None


def _beginning(node: gs.Node, port: StatePort, known: Values) -> tuple[gs.Node, int] | None:
    """Return which node's input is the past, by its number: the node's own, or that of its turn.

    None where the graph provides another past.
    """
    past = node.inputs[port.past] if len(node.inputs) > port.past else gs.Variable.empty()
    # A product of zeros and signs or turns, see ``match.emit.signed_decay``,
    # ``match.emit.complex_diagonal`` and ``models.flash_linear_attention.mamba3``, which are of
    # the tokens at hand.
    turn = None if past.is_empty() else producer(_unshaped(past))
    if turn is not None and turn.op in ("Mul", "MatMul") and port.initial_value == 0:
        zeros = [i for i, t in enumerate(turn.inputs) if known.is_zero(t)]
        if not zeros:
            return None
        # Zeros times a stored number are a start, which no call may multiply again.
        if not all(_is_stored(t, known) for i, t in enumerate(turn.inputs) if i not in zeros):
            return turn, zeros[0]
    zero = port.initial_value == 0 and not past.is_empty() and known.is_zero(past)
    return (node, port.past) if past.is_empty() or zero else None


def _is_stored(tensor: gs.Tensor, known: Values) -> bool:
    return isinstance(tensor, gs.Constant) or known.numbers(tensor) is not None


def _unshaped(tensor: gs.Tensor) -> gs.Tensor:
    """Return what a tensor is a sum of, or the same numbers in another shape or type."""
    node = producer(tensor)
    moved = node is not None and node.op in ("Cast", "ReduceSum", "Reshape")
    return _unshaped(node.inputs[0]) if node is not None and moved else tensor


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
    graph: gs.Graph, node: gs.Node, port: StatePort, index: int, dtype: object, known: Values
) -> None:
    shape = [known_shape(node.inputs[0])[0], *port.sizes]
    while len(node.inputs) <= port.past:
        node.inputs.append(gs.Variable.empty())
    past = gs.Variable(f"past_{port.name}_{index}", dtype=dtype, shape=shape)
    found = _beginning(node, port, known)
    assert found is not None
    reader, place = found
    zeros = reader.inputs[place]
    reader.inputs[place] = past if zeros.is_empty() else _in_place_of(graph, past, zeros)
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
    ensures="every causal linexport node takes its past from an input and gives its present out",
    run=run,
)
