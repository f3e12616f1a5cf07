"""x * Reciprocal(y) -> x / y, which is how runtimes with a kernel for RMS norms know them.

    x * Reciprocal(Sqrt(mean(x^2) + eps)) * weight  ->  x / Sqrt(mean(x^2) + eps) * weight

ONNX Runtime computes the second in one operator, which goes row by row: 0.95 to 2.2 times as fast
on rows of 64 and more, but half as fast on many rows of 16, which are left as they are. PyTorch
writes ``rsqrt``; the quotient is as accurate, and the same to the last digit or two.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from linexport.passes.simplify import made_by

STAGE = "canonicalise"

NARROWEST = 64
"""Shortest rows that a norm's operator is worth it for."""


def run(graph: gs.Graph) -> None:
    """Every product whose factor is the reciprocal of a root."""
    for node in graph.nodes:
        if node.op != "Mul" or node.domain or not node.inputs:  # disconnected by another pass
            continue
        for factor, other in (node.inputs, reversed(node.inputs)):
            root = _root(factor)
            if root is not None and other is not factor and not _narrow(other):
                node.op, node.inputs = "Div", [other, root]
                break


def _root(tensor: gs.Tensor) -> gs.Tensor | None:
    """y, where the tensor is the reciprocal of y and y is a root."""
    reciprocal = made_by(tensor, "Reciprocal")
    value = None if reciprocal is None else reciprocal.inputs[0]
    return value if value is not None and made_by(value, "Sqrt") else None


def _narrow(tensor: gs.Tensor) -> bool:
    width = tensor.shape[-1] if tensor.shape else None
    return isinstance(width, int) and width < NARROWEST
