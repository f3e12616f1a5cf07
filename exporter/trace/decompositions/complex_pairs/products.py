"""Products that are linear in each of their operands, of complex numbers.

f(a + b i, c + d i)  =  f(a, c) - f(b, d) + (f(a, d) + f(b, c)) i
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch.fx import Node

from linexport.trace.decompositions.complex_pairs.arithmetic import add, mul
from linexport.trace.decompositions.complex_pairs.writer import (
    ComplexPair,
    PairWriter,
    Part,
    Rule,
    Rules,
    arguments,
    aten,
    operands,
)


def product(w: PairWriter, factors: Sequence[object], write: Callable[..., Node]) -> ComplexPair:
    """Return a product as the sum of those of all parts; parts that are zero are left out."""
    parts: list[Part] = [0.0, 0.0]
    pairs = [w.pair(x) for x in factors]
    for choice in itertools.product((0, 1), repeat=len(pairs)):
        chosen = [pair[i] for pair, i in zip(pairs, choice, strict=True)]
        if 0.0 in chosen:
            continue
        # i ** 2 is -1, and i ** 3 is -i.
        count = sum(choice) % 4
        combine = w.add if count < 2 else w.sub
        parts[count % 2] = combine(parts[count % 2], write(*chosen))
    return ComplexPair(*parts)


def _of_all(w: PairWriter, node: Node) -> ComplexPair:
    return product(w, operands(node), lambda *parts: w(node.target, *parts))


def _einsum(w: PairWriter, node: Node) -> ComplexPair:
    equation, factors = operands(node)[:2]
    return product(w, factors, lambda *parts: w(aten.einsum.default, equation, [*parts]))


def _linear(w: PairWriter, node: Node) -> ComplexPair:
    x, weight, *bias = operands(node)
    found = product(w, (x, weight), lambda *parts: w(aten.linear.default, *parts))
    return found if not bias or bias[0] is None else add(w, found, w.pair(bias[0]))


def _added(target: object) -> Rule:
    def rule(w: PairWriter, node: Node) -> ComplexPair:
        given = arguments(node)
        added, *factors = operands(node)[:3]
        found = product(w, factors, lambda *parts: w(target, *parts))
        scaled = [
            mul(w, pair, w.pair(given.get(name, 1)))
            for pair, name in ((w.pair(added), "beta"), (found, "alpha"))
        ]
        return add(w, *scaled)

    return rule


RULES: Rules = {
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot", "outer"), _of_all),
    "addmm": _added(aten.mm.default),
    "baddbmm": _added(aten.bmm.default),
    "einsum": _einsum,
    "linear": _linear,
}
