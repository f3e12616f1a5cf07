"""The first value of a graph that differs from the original, with few extra outputs a run.

    v differs: look at some ancestors of it; the first that differs is the new v
    w agrees: its ancestors are cleared

It ends when all ancestors of v that can be compared are cleared: v is then wrong although what it
is computed from is right, or nearly so. With k extra outputs a run that takes about log(n) / log(k)
runs for n values, where marking every value as an output would hold all of them in memory at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx

from linexport.graph.walk import reads

WIDTH = 8
"""Extra outputs of one run."""


@dataclass(frozen=True)
class Found:
    """Outcome of a search.

    Attributes:
        value: name of the value.
        runs: how often the graph was run.
        probed: number of values that were compared.
    """

    value: str
    runs: int
    probed: int


class Ancestry:
    """Which values a value is computed from, in a graph."""

    def __init__(self, nodes: Sequence[onnx.NodeProto]) -> None:
        self.producer = {name: node for node in nodes for name in node.output if name}
        self.order = {name: i for i, name in enumerate(self.producer)}

    def ancestors(self, value: str) -> set[str]:
        """Return everything computed on the way to a value, itself excluded."""
        found: set[str] = set()
        waiting = [value]
        while waiting:
            node = self.producer.get(waiting.pop())
            for name in reads(node) if node is not None else ():
                if name not in found:
                    found.add(name)
                    waiting.append(name)
        return found & self.producer.keys()

    def nearest(self, values: Collection[str], known: Collection[str]) -> list[str]:
        """Return the known values, or inputs of the graph, that ``values`` are computed from.

        A value among ``values`` is looked through, known or not.
        """
        found: dict[str, None] = {}
        seen, waiting = set(values), list(values)
        while waiting:
            node = self.producer.get(waiting.pop())
            for name in reads(node) if node is not None else ():
                if name in seen:
                    continue
                seen.add(name)
                if name in known or name not in self.producer:
                    found[name] = None
                else:
                    waiting.append(name)
        return list(found)


def first_different(
    start: str,
    ancestry: Ancestry,
    comparable: Collection[str],
    differ: Callable[[Collection[str]], Mapping[str, bool]],
    width: int = WIDTH,
) -> Found:
    """Return the first value that differs on the way to ``start``, which does.

    Args:
        start: a value that differs.
        ancestry: of the graph.
        comparable: values that can be compared.
        differ: runs the graph with some values as outputs; says of each whether it differs. One
            that it leaves out is taken as one that cannot be compared.
        width: values that it takes at once.
    """
    value, runs, probed = start, 0, 0
    suspects = ancestry.ancestors(start) & {*comparable}
    while suspects:
        ordered = sorted(suspects, key=ancestry.order.__getitem__)
        step = max(1, -(-len(ordered) // width))
        chosen = ordered[step - 1 :: step] or ordered[-1:]
        outcome = differ(chosen)
        runs, probed = runs + 1, probed + len(chosen)
        suspects -= {*chosen}
        wrong = [name for name in chosen if outcome.get(name)]
        if wrong:
            value = wrong[0]
            suspects &= ancestry.ancestors(value)
        for name in chosen:
            cleared = ancestry.ancestors(name) if outcome.get(name) is False else set()
            if value not in cleared:  # a value that agrees although what it is made of does not
                suspects -= cleared
    return Found(value, runs, probed)
