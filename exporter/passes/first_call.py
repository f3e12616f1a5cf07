"""States that begin with a value of the model's own, in the first call of a sequence alone.

past_i_begun ? past_i : start        past_i_begun is 0 before the first call, and 1 after it
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.edit import nodes_behind, producer
from linexport.graph.partial_eval import Values
from linexport.graph.states import BEGUN
from linexport.graph.tensors import known_shape

SIDES = ("past", "present")
"""Prefixes of the names of a state's input and output."""


def flag(graph: gs.Graph, name: str, batch: int | str) -> gs.Variable:
    """Return the state that says whether there was a call before.

    Args:
        graph: gets its input and its output.
        name: of the state that it is about, without past and present.
        batch: the size of the batch.
    """
    past = gs.Variable(f"past_{name}{BEGUN}", np.float32, [batch, 1])
    present = gs.Variable(f"present_{name}{BEGUN}", np.float32, [batch, 1])
    shape = gs.Variable(f"{past.name}/shape", np.int64, [2])
    one = {"value": gs.Constant(f"{past.name}/one", np.ones(1, np.float32))}
    graph.nodes.append(gs.Node("Shape", shape.name, inputs=[past], outputs=[shape]))
    graph.nodes.append(gs.Node("ConstantOfShape", present.name, one, [shape], [present]))
    graph.inputs.append(past)
    graph.outputs.append(present)
    return past


def chosen(graph: gs.Graph, begun: gs.Variable, past: gs.Tensor, start: gs.Tensor) -> gs.Tensor:
    """Return the past, or what the state begins with where there was no call before.

    Args:
        graph: gets the nodes that choose.
        begun: see ``flag``.
        past: of a batch first.
        start: of the shape and the type of the past.
    """
    stem, rank = f"{past.name}/start", len(known_shape(past))
    axes = gs.Constant(f"{stem}/axes", np.array([0, *[1] * (rank - 1)], np.int64))
    flat = gs.Variable(f"{stem}/begun", np.float32, [known_shape(begun)[0], *[1] * (rank - 1)])
    seen = gs.Variable(f"{stem}/seen", np.bool_, flat.shape)
    found = gs.Variable(stem, past.dtype, past.shape)
    zero = gs.Constant(f"{stem}/zero", np.zeros((), np.float32))
    graph.nodes += [
        gs.Node("Reshape", flat.name, inputs=[begun, axes], outputs=[flat]),
        gs.Node("Greater", seen.name, inputs=[flat, zero], outputs=[seen]),
        gs.Node("Where", found.name, inputs=[seen, past, start], outputs=[found]),
    ]
    return found


def is_carried(graph: gs.Graph, tensor: gs.Tensor) -> bool:
    """Return whether a value follows from a state that the graph has already."""
    sources = {tensor.name, *(t.name for n in nodes_behind([tensor]) for t in n.inputs)}
    presents = {name.replace(*SIDES, 1) for name in sources if name.startswith(SIDES[0])}
    return bool(presents & {t.name for t in graph.outputs})


def is_given(graph: gs.Graph, tensor: gs.Tensor, tokens: str, known: Values) -> bool:
    """Return whether a value is of no token, see ``is_of_no_token``, and not of a state."""
    return is_of_no_token(tensor, tokens, known) and not is_carried(graph, tensor)


def is_of_no_token(tensor: gs.Tensor, tokens: str, known: Values) -> bool:
    """Return whether a value follows from weights, inputs without tokens, and other sizes.

    Args:
        tensor: the value.
        tokens: the symbol of their number.
        known: values of the graph.
    """
    waiting, seen = [tensor], set[int]()
    while waiting:
        given = waiting.pop()
        if id(given) in seen or given.is_empty():
            continue
        seen.add(id(given))
        sizes, node = known.get(given), producer(given)
        if sizes is not None:
            free = not any(tokens in str(size) for size in sizes.flat)
        elif node is None:
            free = isinstance(given, gs.Constant) or tokens not in (given.shape or (tokens,))
        elif node.op == "Shape":
            dims = node.inputs[0].shape
            taken = slice(node.attrs.get("start", 0), node.attrs.get("end"))
            free = dims is not None and not any(tokens in str(size) for size in dims[taken])
        else:
            free = not any(isinstance(value, gs.Graph) for value in node.attrs.values())
            waiting += node.inputs[:1] if node.op == "CastLike" else node.inputs
        if not free:
            return False
    return True
