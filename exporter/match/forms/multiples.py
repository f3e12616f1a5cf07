"""Values of pairs of tokens as multiples of another of them, by the distance between the two.

    tril(s) - tril(s, -w)      is      s times 1 where 0 <= t - s < w, and else times 0

That is why a difference of two values that data decide is zero at some distances.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from linexport.match.forms.distances import ByDistance
from linexport.match.forms.entries_by_distance import Entries


@dataclass(frozen=True)
class Multiple:
    """Multiple of a value of pairs.

    Attributes:
        of: name of that value.
        factors: one for each distance.
    """

    of: str
    factors: Entries

    @property
    def is_selection(self) -> bool:
        """True if it is the value, or zero, at each distance."""
        return bool(np.isin(self.factors, (0, 1)).all())

    def at(self, reach: int) -> ByDistance:
        """Return the factors of distances from -reach to reach, which go on as at the ends."""
        factors = self.factors
        return ByDistance(reach, lambda d: factors[np.clip(d, -reach, reach) + reach] != 0)


def multiple_of(
    node: gs.Node, given: list[Entries], known: Mapping[str, Multiple], kept: np.ndarray
) -> Multiple:
    """Return what a node makes as a multiple; any other value is the multiple 1 of itself.

    Args:
        node: makes a value of pairs.
        given: entries of what it reads.
        known: multiples that are known, by the name of the value.
        kept: at which distances a triangle keeps its entries.
    """
    itself = Multiple(node.outputs[0].name, np.ones(len(kept)))
    parts = [known.get(tensor.name) for tensor in node.inputs[: len(given)]]
    match node.op, parts:
        case "Trilu", [Multiple() as a]:
            return Multiple(a.of, a.factors * kept)
        case "Neg", [Multiple() as a]:
            return Multiple(a.of, -a.factors)
        # f v + g v = (f + g) v
        case "Add" | "Sub", [Multiple() as a, Multiple() as b] if a.of == b.of:
            return Multiple(a.of, a.factors + (b.factors if node.op == "Add" else -b.factors))
        # c (f v) = (c f) v, for a c that positions alone decide.
        case "Mul", [Multiple() as a, _] if not np.isnan(given[1]).any():
            return Multiple(a.of, a.factors * given[1])
        case "Mul", [_, Multiple() as b] if not np.isnan(given[0]).any():
            return Multiple(b.of, b.factors * given[0])
        case "Where", [_, Multiple() as a, _] if _is_selection(given[0], given[2]):
            return Multiple(a.of, np.where(given[0] != 0, a.factors, 0.0))
        case "Where", [_, _, Multiple() as b] if _is_selection(given[0], given[1]):
            return Multiple(b.of, np.where(given[0] != 0, 0.0, b.factors))
    return itself


def _is_selection(truth: Entries, other: Entries) -> bool:
    """Return whether what is chosen is a value or zero, and positions alone decide it."""
    return bool(not np.isnan(truth).any() and (other == 0).all())
