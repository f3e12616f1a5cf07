"""Loops over tokens: whether the state after a token is linear in the state before it.

S_t = F_t(S_{t-1}) + b_t        F_t: sums, products with what is no state, moves
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from linexport.graph.edit import nodes_behind

MOVES = {
    *("Cast", "Expand", "Gather", "Identity", "Pad", "Reshape", "Slice", "Split", "Squeeze"),
    *("Neg", "ReduceMean", "ReduceSum", "Transpose", "Unsqueeze"),
}
"""Linear operators of their first input."""

SUMS = {"Add", "Concat", "Sub", "Sum"}
PRODUCTS = {"Einsum", "Gemm", "MatMul", "Mul"}


def nonlinear_operator(loop: gs.Node) -> str | None:
    """Return the first operator by which a Scan or Loop is not linear in its state, if any."""
    body: gs.Graph = loop.attrs["body"]
    before = body.inputs[2:] if loop.op == "Loop" else body.inputs
    count = len(loop.inputs) - (2 if loop.op == "Loop" else loop.attrs["num_scan_inputs"])
    after = body.outputs[1:] if loop.op == "Loop" else body.outputs
    needed = {id(node) for node in nodes_behind(after[:count])}
    states = {tensor.name for tensor in before[:count]}
    for node in body.nodes:
        taken = [tensor.name in states for tensor in node.inputs]
        if id(node) not in needed or not any(taken):
            continue
        if not _is_linear(node.op, taken):
            return str(node.op)
        states |= {tensor.name for tensor in node.outputs}
    return None


def _is_linear(op: str, taken: list[bool]) -> bool:
    """Return whether an operator is linear in those of its inputs that are taken."""
    if op in SUMS:
        return True
    if op in PRODUCTS:
        return sum(taken[:2]) < 2
    if op == "Where":
        return not taken[0]
    return (op in MOVES or op == "Div") and not any(taken[1:])
