"""Masks that say no more than which keys a query sees.

    n = Range(0, S, 1)
    Where(n <= last T of n  and  key_mask != 0, 0, low)        (B, 1, T, S)  ->  key_mask and low

A query sees the keys of its own and of earlier tokens that ``key_mask`` (B, S) has.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from linexport.plugins.ops.shapes import Dim
from linexport.targets.cpu_fusion.lookup import Lookup, UnmatchedError, terms

END = np.iinfo(np.int32).max
"""A Slice that ends here or behind takes everything from its start on."""


@dataclass(frozen=True)
class SeenKeys:
    """Which keys are seen.

    Attributes:
        key_mask: int64, (B, S).
        low: added to the scores of the others.
    """

    key_mask: str
    low: float


def find_seen_keys(graph: Lookup, mask: str) -> SeenKeys | None:
    """Return what a mask (B, 1, T, S) says, None where it may say something else."""
    try:
        chosen = graph.expect(mask, "Where")
        shown, low = (graph.number(name) for name in chosen.input[1:])
        if shown != 0 or low is None or not low < 0:
            raise UnmatchedError("not zero and a negative number")
        batch, _, length, keys = graph.shape(mask, 4)
        both = graph.expect(chosen.input[0], "And").input
        is_first = graph.producer(both[0], "LessOrEqual") is not None
        earlier, kept = both if is_first else reversed(both)
        _check_earlier(graph, earlier, length, keys)
        return SeenKeys(_key_mask(graph, kept, batch, keys), low)
    except UnmatchedError:
        return None


def _check_earlier(graph: Lookup, name: str, length: Dim, keys: Dim) -> None:
    """Check that a value is whether a key's number is at most that of a query, the last T of all.

    A Slice of T of S numbers that ends with them can only begin with number S - T.

    Raises:
        UnmatchedError: it may be something else.
    """
    numbers, rows = graph.expect(name, "LessOrEqual").input
    steps = [graph.integers(graph.expect(numbers, "Range").input[i]) for i in (0, 2)]
    own = graph.expect(graph.expect(rows, "Unsqueeze").input[0], "Slice")
    end, axis, *step = (graph.integers(given) for given in own.input[2:])
    if (
        steps != [[0], [1]]
        or own.input[0] != numbers
        or (axis, step) not in (([0], []), ([0], [[1]]))
        or end is None
        or end[0] < END
        or graph.stated(own.output[0]) != (length,)
        or graph.stated(rows) != (length, 1)
        or [terms(size) for size in graph.stated(numbers)] != [terms(keys)]
    ):
        raise UnmatchedError("not the numbers of keys and of the last of them")


def _key_mask(graph: Lookup, name: str, batch: Dim, keys: Dim) -> str:
    """Return the integers (B, S) that (B, 1, 1, S) is made of.

    Raises:
        UnmatchedError: it is made of something else.
    """
    shape, node = graph.stated(name), graph.expect(name, "Unsqueeze")
    while (inner := graph.producer(node.input[0], "Unsqueeze")) is not None:
        node = inner
    source = graph.expect(node.input[0], "Cast", to=TensorProto.BOOL).input[0]
    if (
        [*shape[:3]] != [batch, 1, 1]
        or len(shape) != 4
        or graph.type(source) != TensorProto.INT64
        or graph.stated(source) != (batch, shape[3])
        or terms(shape[3]) != terms(keys)
    ):
        raise UnmatchedError("not a number for every key")
    return source
