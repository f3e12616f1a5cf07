"""x / (y + eps) of sums in float16 -> the sums, what is between and the quotient in float32.

    Div(Slice(MatMul(a, b)), Add(Slice(MatMul(a, b)), eps))

becomes

    a', b' = Cast(a), Cast(b)
    Cast(Div(Slice(MatMul(a', b')), Add(Slice(MatMul(a', b')), eps)))

Sums over thousands of tokens leave float16 at 65504: of ReLU attention where queries, keys and
values are of some ten, whose quotient is a mean of values, and small. An epsilon such as 1e-15,
which is 0 in float16, keeps the value that code gives it. A power of two would cancel above and
below as well; it has to be chosen for inputs, and this not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto

from linexport.graph.contract import Pass, PassResult
from linexport.graph.edit import element_type_of, producer

log = logging.getLogger(__name__)

SUMS = {"MatMul", "Einsum", "ReduceSum", "CumSum"}
OF_NUMBERS = {"MatMul", "Einsum", "Mul", "Add", "Sub", "Div", "Max", "Min"}
"""Operators that quotients of sums are made of, all of whose inputs are numbers."""

OF_ONE = {
    *("ReduceSum", "CumSum", "Cast", "Identity", "Expand", "Reshape", "Slice"),
    *("Split", "Squeeze", "Unsqueeze", "Transpose", "Reciprocal", "Neg"),
}
"""Operators whose first input alone is of numbers."""

HALF = np.dtype(np.float16)


def run(graph: gs.Graph) -> PassResult:
    """Rewrite every such quotient."""
    summed = _summed(graph)
    inside: dict[int, gs.Node] = {}
    for node in graph.nodes:
        if _is_half(node.outputs) and _is_quotient(node, summed):
            inside |= {id(one): one for one in _made_of(node, summed)}
    if not inside:
        return PassResult(False)
    log.info("%d nodes of quotients are computed in float32", len(inside))
    halves = [t for one in inside.values() for t in one.outputs if element_type_of(t) != FLOAT]
    for node in inside.values():
        _widen(graph, node, inside)
    for tensor in halves:
        tensor.dtype = np.dtype(np.float32)
        _narrow(graph, tensor, inside)
    graph.cleanup().toposort()
    return PassResult(True)


FLOAT = TensorProto.FLOAT


def _is_half(outputs: Sequence[gs.Tensor]) -> bool:
    return len(outputs) == 1 and element_type_of(outputs[0]) == TensorProto.FLOAT16


def _numbers(node: gs.Node) -> list[gs.Tensor]:
    """Return the inputs of a node that are numbers."""
    return [node.inputs[place] for place in _places(node)]


def _places(node: gs.Node) -> range:
    if node.domain or node.op not in OF_NUMBERS | OF_ONE:
        return range(0)
    return range(len(node.inputs) if node.op in OF_NUMBERS else min(1, len(node.inputs)))


def _summed(graph: gs.Graph) -> set[int]:
    """Return the values that are sums of products of computed values, or are made of such."""
    found: set[int] = set()
    for node in graph.nodes:
        numbers = _numbers(node)
        own = node.op in SUMS and not any(map(_is_weight, numbers))
        made = node.op not in ("MatMul", "Einsum") and any(id(t) in found for t in numbers)
        if numbers and (own or made):
            found |= {id(t) for t in node.outputs}
    return found


def _is_weight(tensor: gs.Tensor) -> bool:
    """Return whether a value is stored, be it transposed or cast."""
    node = producer(tensor)
    if isinstance(tensor, gs.Constant):
        return True
    moved = node is not None and node.op in ("Transpose", "Cast", "Identity")
    return moved and node is not None and _is_weight(node.inputs[0])


def _is_quotient(node: gs.Node, summed: set[int]) -> bool:
    """Return whether a node gives one sum over another."""
    if node.op not in ("Div", "Mul") or not all(id(t) in summed for t in _numbers(node)):
        return False
    return node.op == "Div" or any(_is_inverse(t, summed) for t in node.inputs)


def _is_inverse(tensor: gs.Tensor, summed: set[int]) -> bool:
    node = producer(tensor)
    if node is None or node.op not in ("Reciprocal", "Div"):
        return False
    return node.op == "Reciprocal" or id(node.inputs[0]) not in summed


def _made_of(node: gs.Node, summed: set[int]) -> Iterator[gs.Node]:
    """Yield the nodes from sums to a quotient, it included."""
    pending, seen = [node], set[int]()
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        pending += [t.inputs[0] for t in _numbers(one) if id(t) in summed]


def _widen(graph: gs.Graph, node: gs.Node, inside: dict[int, gs.Node]) -> None:
    """Let a node read float32."""
    if node.op == "Cast":
        node.attrs["to"] = FLOAT
    for place in _places(node):
        node.inputs[place] = _wide(graph, node.inputs[place], inside)


def _wide(graph: gs.Graph, tensor: gs.Tensor, inside: dict[int, gs.Node]) -> gs.Tensor:
    """Return a value in float32."""
    node = producer(tensor)
    if (node is not None and id(node) in inside) or element_type_of(tensor) == FLOAT:
        return tensor
    if isinstance(tensor, gs.Constant):
        return gs.Constant(f"{tensor.name}/float32", tensor.values.astype(np.float32))
    if node is not None and node.op == "Cast" and element_type_of(node.inputs[0]) == FLOAT:
        return node.inputs[0]  # more digits than what was cast, and its range
    name = f"{tensor.name}/float32"
    cast = next((n for n in tensor.outputs if n.op == "Cast" and n.name == name), None)
    if cast is None:
        result = gs.Variable(name, np.dtype(np.float32), tensor.shape)
        cast = gs.Node("Cast", name, {"to": FLOAT}, [tensor], [result])
        graph.nodes.append(cast)
    made: gs.Tensor = cast.outputs[0]
    return made


def _narrow(graph: gs.Graph, tensor: gs.Tensor, inside: dict[int, gs.Node]) -> None:
    """Let what reads a value outside of the quotients have it in float16, as before."""
    readers = [node for node in tensor.outputs if id(node) not in inside]
    is_output = any(tensor is output for output in graph.outputs)
    if not readers and not is_output:
        return
    made = gs.Variable(f"{tensor.name}/float16", HALF, tensor.shape)
    for node in readers:
        node.inputs = [made if t is tensor else t for t in node.inputs]
    name = f"{tensor.name}/Cast"
    graph.nodes.append(gs.Node("Cast", name, {"to": TensorProto.FLOAT16}, [tensor], [made]))
    if is_output:
        _exchange_names(graph, tensor, made)


def _exchange_names(graph: gs.Graph, tensor: gs.Tensor, made: gs.Variable) -> None:
    """Let the cast value be the output of the graph, by its name."""
    tensor.name, made.name = f"{tensor.name}/float32", tensor.name
    graph.outputs = [made if t is tensor else t for t in graph.outputs]


PASS = Pass(
    name="float32_quotients",
    stage="canonicalise",
    ensures="no quotient of sums is computed in float16",
    run=run,
)
