"""Fourier transforms, whose complex numbers torch.onnx writes with an axis of 2 at the end.

What torch.onnx translates as a whole, such as irfft(rfft(u) rfft(k)), is left to it: its form is
the one that ``match.forms.fourier`` knows. For other transforms pairs are joined before them and
split behind them.
"""

from __future__ import annotations

from collections.abc import Set

from torch.fx import Graph, Node

from linexport.trace.decompositions.complex_pairs.layout import join, parts_of
from linexport.trace.decompositions.complex_pairs.writer import (
    ComplexPair,
    PairWriter,
    Rules,
    aten,
    is_complex,
    operands,
    opname,
    value_of,
)

TRANSFORMS = frozenset({"_fft_r2c", "_fft_c2r", "_fft_c2c"})

BESIDE = frozenset(
    {
        *("_conj", "_unsafe_view", "abs", "cat", "clone", "flip", "neg", "permute", "slice"),
        *("stack", "transpose", "view", "view_as_complex", "view_as_real"),
    }
)
"""Operators of complex numbers, other than transforms, that torch.onnx translates."""

PRODUCTS = frozenset({"add", "div", "mul", "sub"})
"""Operators that it translates where both operands are complex tensors."""


def left_to_torch(graph: Graph) -> Set[Node]:
    """Return nodes of complex numbers that torch.onnx translates together with transforms."""
    kept: set[Node] = set()
    seen: set[Node] = set()
    for node in graph.nodes:
        if node in seen or opname(node) not in TRANSFORMS:
            continue
        group = _connected(node)
        seen |= group
        if all(map(_is_translated, group)):
            kept |= group
    return kept


def _connected(start: Node) -> set[Node]:
    """Return the nodes that a node exchanges complex numbers with, through any others."""
    found, waiting = set[Node](), [start]
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found.add(node)
        waiting += [x for x in node.all_input_nodes if is_complex(x)]
        waiting += node.users if is_complex(node) else []
    return found


def _is_translated(node: Node) -> bool:
    name = opname(node)
    both = all(isinstance(x, Node) and is_complex(x) for x in operands(node)[:2])
    known = name in TRANSFORMS | BESIDE or (name in PRODUCTS and both)
    return known or node.op == "placeholder"


def _apart(w: PairWriter, transformed: Node) -> ComplexPair:
    return parts_of(w, w(aten.view_as_real.default, transformed))


def _together(w: PairWriter, node: Node) -> Node:
    x = operands(node)[0]
    return w(aten.view_as_complex.default, join(w, w.pair(x), value_of(x).shape))


def _of_real(w: PairWriter, node: Node) -> ComplexPair:
    return _apart(w, w(node.target, *operands(node)))


def _to_real(w: PairWriter, node: Node) -> Node:
    return w(node.target, _together(w, node), *operands(node)[1:])


def _of_complex(w: PairWriter, node: Node) -> ComplexPair:
    return _apart(w, _to_real(w, node))


RULES: Rules = {"_fft_r2c": _of_real, "_fft_c2r": _to_real, "_fft_c2c": _of_complex}
