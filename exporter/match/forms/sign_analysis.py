"""The sign of every entry of a tensor, from the operators that make it.

f(x) >= 0 of any x        Exp, Relu, Sigmoid, ...
x y                       the product of the signs
sums, moves               the sign of what is summed or moved
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.operators import CHOICES, NEVER_NEGATIVE, SUMS
from linexport.match.forms import functions
from linexport.match.forms.terms import Leaf

KEEPS = CHOICES | SUMS
"""Operators that give a choice of entries of their first input, or add them up."""

DEEPEST = 30


def sign_of(leaf: Leaf) -> int:
    """Return 1 where no entry is below 0, -1 where none is above, and 0 where neither is known."""
    inside = _sign(leaf.tensor)
    if functions.never_negative(leaf.function, inside == 1):
        return 1
    opposite = ("Neg", (), leaf.function)
    if functions.never_negative(opposite, inside == 1):
        return -1
    return inside if leaf.function == ("x",) else 0


def is_fraction(tensor: gs.Tensor) -> bool:
    """Return whether every entry is between 0 and 1, as those of a sigmoid are."""
    node = tensor.inputs[0] if tensor.inputs else None
    while node is not None and node.op in CHOICES and node.inputs[0].inputs:
        node = node.inputs[0].inputs[0]
    return node is not None and node.op in ("Sigmoid", "Softmax")


def _sign(tensor: gs.Tensor, depth: int = 0) -> int:
    if isinstance(tensor, gs.Constant):
        values = np.asarray(tensor.values)
        return 1 if (values >= 0).all() else -1 if (values <= 0).all() else 0
    node = tensor.inputs[0] if tensor.inputs else None
    if node is None or depth > DEEPEST or node.domain not in (None, "", "ai.onnx"):
        return 0
    if node.op in NEVER_NEGATIVE:
        return 1
    rule = RULES.get(node.op)
    return 0 if rule is None else rule(node, depth + 1)


def _kept(node: gs.Node, depth: int) -> int:
    return _sign(node.inputs[0], depth)


def _negated(node: gs.Node, depth: int) -> int:
    return -_sign(node.inputs[0], depth)


def _multiplied(node: gs.Node, depth: int) -> int:
    return _sign(node.inputs[0], depth) * _sign(node.inputs[1], depth)


def _shared(node: gs.Node, depth: int) -> int:
    """Return the sign that all inputs have."""
    signs = {_sign(t, depth) for t in node.inputs}
    return signs.pop() if len(signs) == 1 else 0


def _subtracted(node: gs.Node, depth: int) -> int:
    """Return the sign of c - f, which is not below 0 for c >= 1 and f between 0 and 1."""
    return 1 if _is_one(node.inputs[0]) and is_fraction(node.inputs[1]) else 0


def _clipped(node: gs.Node, depth: int) -> int:
    """Return the sign of max(x, low) >= low, which without a bound is a choice of x."""
    if len(node.inputs) > 1 and not node.inputs[1].is_empty():
        return 1 if _sign(node.inputs[1], depth) == 1 else 0
    return _kept(node, depth) if node.op in KEEPS else 0


def _logarithm(node: gs.Node, depth: int) -> int:
    """Return the sign of log f, which is not above 0 for f between 0 and 1."""
    maker = node.inputs[0].inputs[0] if node.inputs[0].inputs else None
    return -1 if maker is not None and maker.op in ("Sigmoid", "Softmax") else 0


def _is_one(tensor: gs.Tensor) -> bool:
    return isinstance(tensor, gs.Constant) and bool((np.asarray(tensor.values) >= 1).all())


def _chosen(node: gs.Node, depth: int) -> int:
    """Return the sign of a choice; x where it is above a number that is not negative has that."""
    condition, x, otherwise = node.inputs
    greater = condition.inputs[0] if condition.inputs else None
    bounded = greater is not None and greater.op == "Greater" and greater.inputs[0] is x
    above = bounded and greater is not None and _sign(greater.inputs[1], depth) == 1
    # Where(x > y, x, z) takes x only where it is above y >= 0.
    first, second = 1 if above else _sign(x, depth), _sign(otherwise, depth)
    return first if first == second else 0


RULES: dict[str, Callable[[gs.Node, int], int]] = {
    **dict.fromkeys(("Add", "Sum", "Min", "Max"), _shared),
    **dict.fromkeys(KEEPS, _kept),
    "Where": _chosen,
    "Sub": _subtracted,
    "Clip": _clipped,
    "Neg": _negated,
    "Mul": _multiplied,
    "Div": _multiplied,
    "Log": _logarithm,
}
"""The sign of what an operator gives, of those that do not have one sign always."""
