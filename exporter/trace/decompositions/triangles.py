"""Matrices of a traced program that are triangular whatever their values are.

A matrix has three parts: below its diagonal, on it, above it. Each operator says in which of them
its result may be zero, and in which it may be something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import Node

from linexport.errors import UnsupportedModelError
from linexport.system.torch_internals.operators import short_name
from linexport.trace.decompositions import triangular_inverse

Parts = frozenset[str]
ALL: Parts = frozenset({"below", "diagonal", "above"})
LOWER: Parts = frozenset({"below", "diagonal"})
UPPER: Parts = frozenset({"diagonal", "above"})


@dataclass(frozen=True)
class Support:
    """Parts of a matrix.

    Attributes:
        filled: where something besides zero (or False) may be.
        empty: where zero may be.
        unit: the diagonal is 1 throughout.
    """

    filled: Parts = ALL
    empty: Parts = ALL
    unit: bool = False


UNKNOWN = Support()


def mark_triangular(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return a program that states of matrices it inverts on which side of the diagonal they are 0.

    Of a matrix that is said to be triangular it states whether its diagonal is 1.

    Raises:
        UnsupportedModelError: a matrix may be filled on both sides.
    """
    if not any(map(_is_open, program.graph.nodes)):
        return program
    # Without writing in place: every value then has a node of its own.
    program = program.run_decompositions({})
    supports = _Supports(program)
    for node in program.graph.nodes:
        if not _is_open(node):
            continue
        matrix, *given = node.args
        found = supports.of(matrix)
        if given:
            node.args = (matrix, given[0], found.unit)
            continue
        filled = found.filled
        if not (filled <= LOWER or filled <= UPPER):
            where = (node.stack_trace or "").strip().splitlines()
            line = "" if len(where) < 2 else f"\n{where[-2].strip()}: {where[-1].strip()}"
            raise UnsupportedModelError(
                "The model inverts a matrix that is not seen to be triangular, for which ONNX has "
                "no operator. A triangular one is solved by torch.linalg.solve_triangular, or is "
                f"made by tril, triu or masked_fill before it is inverted.{line}"
            )
        node.target = triangular_inverse.OPERATOR
        node.args = (matrix, not filled <= LOWER, found.unit)
    program.graph_module.recompile()
    return program


def _is_open(node: Node) -> bool:
    """Return whether something of the matrix that a node inverts is not stated."""
    triangular = node.target is triangular_inverse.OPERATOR and not node.args[2]
    return triangular or node.target is triangular_inverse.UNMARKED


class _Supports:
    """Parts of the matrices of a program, by node."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        signature = program.graph_signature
        stored = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
        values = {**dict(program.named_buffers()), **program.constants}
        self.stored = {name: values[at] for name, at in stored.items() if at in values}
        self._known: dict[Node, Support] = {}

    def of(self, node: object) -> Support:
        """Return the parts of one matrix; of a number, as of a matrix full of it."""
        if not isinstance(node, Node):
            return _of_number(node)
        if node not in self._known:
            square = _is_square(node.meta.get("val"))
            self._known[node] = self._compute(node) if square else UNKNOWN
        return self._known[node]

    def _compute(self, node: Node) -> Support:
        if node.op == "placeholder":
            return _of_tensor(self.stored.get(node.name))
        name = short_name(node.target)  # masked_fill of aten.masked_fill.Scalar
        if node.op != "call_function" or name not in RULES:
            return UNKNOWN
        found = RULES[name](self, *node.args)
        if node.kwargs.get("alpha", 1) != 1:
            found = replace(found, unit=False)
        # 0.5 as an integer is 0.
        integers = node.meta["val"].dtype not in (torch.bool, torch.float32, torch.float64)
        return replace(found, empty=ALL) if integers else found


def _is_square(x: object) -> bool:
    """Return whether a value is a matrix, or several, that is not stretched to become one."""
    sizes = [str(size) for size in getattr(x, "shape", ())[-2:]]
    return len(sizes) == 2 and sizes[0] == sizes[1] != "1"


def _of_number(value: object) -> Support:
    if not isinstance(value, bool | int | float):
        return UNKNOWN
    return Support(ALL if value else frozenset(), frozenset() if value else ALL)


def _of_tensor(x: Tensor | None) -> Support:
    if x is None or not _is_square(x):
        return UNKNOWN
    size = x.shape[-1]
    parts = {
        "below": torch.ones(size, size, dtype=torch.bool).tril(-1),
        "diagonal": torch.eye(size, dtype=torch.bool),
        "above": torch.ones(size, size, dtype=torch.bool).triu(1),
    }
    unit = bool((x[..., parts["diagonal"]] == 1).all())
    filled = {name for name, part in parts.items() if bool((x[..., part] != 0).any())}
    empty = {name for name, part in parts.items() if bool((x[..., part] == 0).any())}
    return Support(frozenset(filled), frozenset(empty), unit)


def _cut(s: _Supports, x: Node, diagonal: int, kept: dict[int, Parts]) -> Support:
    inside = kept.get(diagonal, ALL)
    # Beside one of these diagonals a part is cut in two.
    outside = ALL - inside if diagonal in kept else ALL
    found = s.of(x)
    return Support(found.filled & inside, found.empty | outside)


def _tril(s: _Supports, x: Node, diagonal: int = 0) -> Support:
    return _cut(s, x, diagonal, {0: LOWER, -1: frozenset({"below"})})


def _triu(s: _Supports, x: Node, diagonal: int = 0) -> Support:
    return _cut(s, x, diagonal, {0: UPPER, 1: frozenset({"above"})})


def _eye(s: _Supports, rows: object, columns: object = None, *_: object) -> Support:
    diagonal: Parts = frozenset({"diagonal"})
    square = columns is None or columns is rows or columns == rows
    return Support(diagonal, ALL - diagonal, True) if square else UNKNOWN


def _same(s: _Supports, x: Node, *_: object) -> Support:
    return s.of(x)


def _negative(s: _Supports, x: Node) -> Support:
    return replace(s.of(x), unit=False)


def _opposite(s: _Supports, x: Node, *_: object) -> Support:
    found = s.of(x)
    return Support(found.empty, found.filled)


def _sum(s: _Supports, x: Node, y: object) -> Support:
    a, b = s.of(x), s.of(y)
    unit = (a.unit and "diagonal" not in b.filled) or (b.unit and "diagonal" not in a.filled)
    return Support(a.filled | b.filled, unit=unit)


def _difference(s: _Supports, x: Node, y: object) -> Support:
    a, b = s.of(x), s.of(y)
    return Support(a.filled | b.filled, unit=a.unit and "diagonal" not in b.filled)


def _product(s: _Supports, x: Node, y: object) -> Support:
    a, b = s.of(x), s.of(y)
    return Support(a.filled & b.filled, a.empty | b.empty)


def _quotient(s: _Supports, x: Node, y: object) -> Support:
    return replace(s.of(x), unit=False)


def _fill(s: _Supports, x: Node, mask: Node, value: object) -> Support:
    return _choice(s, mask, value, x)


def _choice(s: _Supports, mask: Node, x: object, y: object) -> Support:
    chosen, a, b = s.of(mask), s.of(x), s.of(y)
    filled = (chosen.filled & a.filled) | (chosen.empty & b.filled)
    return Support(filled, (chosen.filled & a.empty) | (chosen.empty & b.empty))


def _filling(value: bool) -> Callable[..., Support]:
    return lambda *_: _of_number(value)


def _full(s: _Supports, size: object, value: object, *_: object) -> Support:
    return _of_number(value)


def _unsqueezed(s: _Supports, x: Node, dim: int) -> Support:
    rank = x.meta["val"].dim()
    return s.of(x) if 0 <= dim <= rank - 2 or dim < -2 else UNKNOWN


def _equal(s: _Supports, x: Node, value: object) -> Support:
    return _opposite(s, x) if value == 0 and not isinstance(value, Node) else UNKNOWN


RULES: dict[str, Callable[..., Support]] = {
    "tril": _tril,
    "triu": _triu,
    "eye": _eye,
    "neg": _negative,
    **dict.fromkeys(("alias", "clone", "contiguous", "detach", "expand", "lift_fresh_copy"), _same),
    **dict.fromkeys(("to", "_to_copy", "type_as"), _same),
    **dict.fromkeys(("logical_not", "bitwise_not"), _opposite),
    "add": _sum,
    "sub": _difference,
    "mul": _product,
    "div": _quotient,
    "masked_fill": _fill,
    "where": _choice,
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _filling(True)),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _filling(False)),
    "full": _full,
    "unsqueeze": _unsqueezed,
    "eq": _equal,
}
"""Rules by the name of an operator; in all others, anything may be anywhere."""
