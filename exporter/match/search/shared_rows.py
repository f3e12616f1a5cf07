"""Keys and values that are repeated for the heads of queries that share them.

    x (B, G, T, d)  ->  Unsqueeze  ->  Expand (B, G, r, T, d)  ->  Reshape (B, G r, T, d)
    x (B, 1, T, d)  ->  Expand (B, r, T, d)

or the same with tokens before heads and a Transpose behind it, or with a Transpose of tokens and
channels at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.edit import producer
from linexport.graph.monomials import ONE, Size
from linexport.match.forms.evaluate import Evaluator

HEADS_FIRST, TURNED = [0, 2, 1, 3], [0, 1, 3, 2]


@dataclass(frozen=True)
class SharedRows:
    """Rows before they are repeated.

    Attributes:
        rows: (B, G, T, d), or (B, T, G, d).
        tokens_first: the latter.
        heads: G.
        served: how many heads of queries share one of these.
        width: d.
    """

    rows: gs.Tensor
    tokens_first: bool
    heads: int
    served: int
    width: int

    @property
    def letters(self) -> str:
        """Axes of the rows: b, h, n for tokens, d for channels."""
        return "bnhd" if self.tokens_first else "bhnd"

    def repeated(self, rows: np.ndarray) -> np.ndarray:
        """Return the copies of rows, (B, G r, T, d)."""
        first = rows.swapaxes(1, 2) if self.tokens_first else rows
        return first.repeat(self.served, 1)


def find_shared_rows(e: Evaluator, tensor: gs.Tensor) -> SharedRows | None:
    """Return what rows (B, G r, T, d), or (B, G r, d, T), are copies of; None if they are not."""
    x, perm = _transposed(tensor)
    if perm == TURNED:
        x, perm = _transposed(x)
    axis = 1
    if perm == HEADS_FIRST:
        axis = 2
    elif perm:
        return None
    alone = producer(x, "Expand")
    if alone is not None:
        return _of_one_head(e, alone, axis)
    joined = producer(x, "Reshape")
    each = None if joined is None else producer(joined.inputs[0], "Expand")
    if joined is None or each is None:
        return None
    given, wide, flat = (e.sizes(t) for t in (each.inputs[0], joined.inputs[0], x))
    if given is None or wide is None or flat is None or len(given) != 5 or len(wide) != 5:
        return None
    copies, heads, width = wide[axis + 1].known, wide[axis].known, wide[4].known
    if copies is None or heads is None or width is None or given[axis + 1] != ONE:
        return None
    own, rest = (_without(sizes, axis + 1) for sizes in (given, wide))
    merged = [*rest[:axis], Size(heads * copies), *rest[axis + 1 :]]
    added = producer(each.inputs[0], "Unsqueeze")
    if own != rest or flat != merged or added is None or e.sizes(added.inputs[0]) != own:
        return None
    return SharedRows(added.inputs[0], axis == 2, heads, copies, width)


def _of_one_head(e: Evaluator, each: gs.Node, axis: int) -> SharedRows | None:
    """Return the rows of one head that an Expand repeats."""
    given, wide = e.sizes(each.inputs[0]), e.sizes(each.outputs[0])
    if given is None or wide is None or len(given) != 4 or len(wide) != 4:
        return None
    copies, width = wide[axis].known, wide[3].known
    fits = given[axis] == ONE and _without(given, axis) == _without(wide, axis)
    if not fits or copies is None or width is None:
        return None
    return SharedRows(each.inputs[0], axis == 2, 1, copies, width)


def _without(sizes: list[Size], axis: int) -> list[Size]:
    return [*sizes[:axis], *sizes[axis + 1 :]]


def _transposed(x: gs.Tensor) -> tuple[gs.Tensor, list[int]]:
    """Return what a Transpose takes, and its order of axes; [] where there is none."""
    node = producer(x, "Transpose")
    return (x, []) if node is None else (node.inputs[0], list(node.attrs["perm"]))
