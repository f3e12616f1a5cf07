"""Sums over the last tokens with a weight for each pair of tokens, in standard operators.

    y_t = sum_s a_ts v_s        a_ts = f(q_t k_s, ...) where 0 <= t - s < w, and else 0

f may be any function of entries, and a mask be written in any way: what counts is that each sum
over keys finds something neutral at all other distances: zero, or minus infinity for a maximum or a
softmax. Values of pairs between products of queries and keys and sums over keys are one band. What
it reads of each key, such as keys, values and sums of decays, are its columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.operators import CONTRACTIONS, ON_NUMBERS, SIZES_ONLY, without_entries
from linexport.graph.partial_eval import stated_sizes
from linexport.graph.tensors import known_shape
from linexport.match.errors import NotAttentionError
from linexport.match.forms.distances import ByDistance, read_distances
from linexport.match.forms.entries_by_distance import EXCLUDED, UNKNOWN, Entries, made_of
from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.multiples import Multiple, multiple_of
from linexport.match.forms.token_sizes import TokenSizes, of_positions

ZERO = without_entries(0.0)
"""Sums over keys, of which zeros are no part."""

LEAST = without_entries(-math.inf)
"""Operators over keys, of which scores of minus infinity are no part."""

MOST_NODES = 60


@dataclass(frozen=True)
class BandColumn:
    """Value of each key that a band reads.

    Attributes:
        tensor: the value.
        axis: of the keys.
    """

    tensor: gs.Tensor
    axis: int


@dataclass
class Band:
    """Values of pairs of tokens, and the sums over keys that they are made for.

    Attributes:
        nodes: in graph order.
        masks: values of pairs that positions alone decide, by name.
        columns: by name.
        neutral: values that are summed over keys, with the operator.
        diagonals: of triangles, by the name of their node.
        selections: sums, by name, that are another value of pairs at some distances and 0 at all
            others: the name of that value, and where they are it.
        rows: earlier tokens that a token sees.
        counts: whether a row before the first token would count, although all it has is zero.
    """

    nodes: list[gs.Node] = field(default_factory=list)
    masks: dict[str, tuple[gs.Tensor, ByDistance]] = field(default_factory=dict)
    columns: dict[str, BandColumn] = field(default_factory=dict)
    neutral: list[tuple[gs.Tensor, str]] = field(default_factory=list)
    diagonals: dict[str, int] = field(default_factory=dict)
    selections: dict[str, tuple[str, ByDistance]] = field(default_factory=dict)
    rows: int = 0
    counts: bool = False


class BandReader:
    """Reads bands of a graph.

    Args:
        graph: its nodes are in order.
        sizes: which symbol is the number of tokens.
    """

    def __init__(self, graph: gs.Graph, sizes: TokenSizes) -> None:
        self.graph, self.sizes = graph, sizes
        self.evaluator = Evaluator(graph)
        self._positions = of_positions(graph)
        self._outputs = {id(t) for t in graph.outputs}
        self._place = {id(node): i for i, node in enumerate(graph.nodes)}

    def sums(self) -> Iterator[gs.Node]:
        """Yield the nodes that sum values of pairs over keys."""
        for node in self.graph.nodes:
            if node.op in ZERO | LEAST | CONTRACTIONS and self._summed(node) is not None:
                yield node

    def read(self, node: gs.Node) -> Band:
        """Return the band that a sum over keys is part of.

        Raises:
            NotAttentionError: there is none, or it is not followed.
        """
        band, pending, seen = Band(), [node], set[int]()
        while pending:
            node = pending.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            band.nodes.append(node)
            if len(seen) > MOST_NODES:
                raise NotAttentionError(f"more than {MOST_NODES} nodes are of pairs of tokens")
            pending += self._inputs(node, band)
            pending += self._readers(node)
        if not band.columns:
            raise NotAttentionError(f"{node.name} reads no values of keys")
        band.nodes.sort(key=lambda n: self._place[id(n)])
        band.rows = self._rows(band)
        return band

    def _summed(self, node: gs.Node) -> gs.Tensor | None:
        """Return the value of pairs that a node sums over keys."""
        given = node.inputs[0]
        if node.op in CONTRACTIONS:
            place = self._weights(node)
            return None if place is None else node.inputs[place]
        if node.op not in ZERO | LEAST or not self.sizes.is_pair(given):
            return None
        rank = len(known_shape(given))
        if node.op == "Softmax":
            axes: list[int] | None = [node.attrs.get("axis", -1)]
        else:
            axes = self.evaluator.ints(node, 1, "axes")
        return given if axes is not None and [a % rank for a in axes] == [rank - 1] else None

    def _weights(self, node: gs.Node) -> int | None:
        """Return which input of a product is of pairs and is summed over keys."""
        if node.op == "MatMul":
            return 0 if self.sizes.is_pair(node.inputs[0]) else None
        letters = _letters(node)
        for place, tensor in enumerate(node.inputs):
            key = letters[place][-1] if letters else ""
            if letters and self.sizes.is_pair(tensor) and key not in letters[-1]:
                return place
        return None

    def _inputs(self, node: gs.Node, band: Band) -> list[gs.Node]:
        """Note what a node of a band reads; returns the nodes of values of pairs among it."""
        if node.op in CONTRACTIONS:
            own = self._weights(node)
            if own is None:
                self._keys(node, band)
                return []
            band.neutral.append((node.inputs[own], node.op))
            self._column(node, 1 - own, self._value_axis(node, own), band)
            return self._pair(node.inputs[own], band)
        if self._summed(node) is not None:
            band.neutral.append((node.inputs[0], node.op))
            band.counts = True
            return self._pair(node.inputs[0], band)
        if node.op not in ON_NUMBERS and not self._is_triangle(node):
            raise NotAttentionError(f"values of pairs of tokens pass through {node.op} {node.name}")
        found, given = [], node.inputs
        if self._is_triangle(node):
            band.diagonals[node.name] = self._diagonal(node)
            given = node.inputs[:1]
        for place, tensor in enumerate(given):
            if self.sizes.is_pair(tensor):
                found += self._pair(tensor, band)
            elif self._has_keys(tensor):
                self._column(node, place, len(stated_sizes(tensor) or ()) - 1, band)
        return found

    def _is_triangle(self, node: gs.Node) -> bool:
        return node.op == "Trilu" and self.sizes.is_pair(node.inputs[0])

    def _diagonal(self, node: gs.Node) -> int:
        """Return the diagonal of a triangle."""
        if len(node.inputs) < 2 or node.inputs[1].is_empty():
            return 0
        found = self.evaluator.ints(node, 1, "k")
        if found is None:
            raise NotAttentionError(f"the diagonal of {node.name} depends on data")
        return found[0]

    def _pair(self, tensor: gs.Tensor, band: Band) -> list[gs.Node]:
        """Note a mask, or return the node that makes a value of pairs."""
        if tensor.name in band.masks:
            return []
        if tensor.name in self._positions or not tensor.inputs:
            try:
                band.masks[tensor.name] = tensor, read_distances(self.evaluator, tensor)
                return []
            except NotAttentionError:
                if not tensor.inputs:
                    raise
        return list(tensor.inputs)

    def _has_keys(self, tensor: gs.Tensor) -> bool:
        """Return whether the last axis of a value is the keys, where entries meet."""
        sizes = stated_sizes(tensor)
        if sizes is None:
            raise NotAttentionError(f"the sizes of {tensor.name} are not known")
        return bool(sizes) and sizes[-1] == self.sizes.tokens

    def _keys(self, node: gs.Node, band: Band) -> None:
        """Note the keys of a product that gives scores."""
        if node.op == "MatMul":
            return self._column(node, 1, len(node.inputs[1].shape or ()) - 1, band)
        letters = _letters(node)
        key = letters[-1][-1] if letters else ""
        places = [i for i, term in enumerate(letters[:-1]) if key in term]
        if len(places) != 1 or not self.sizes.is_pair(node.outputs[0]):
            raise NotAttentionError(f"{node.name} is not a product of queries and keys")
        return self._column(node, places[0], letters[places[0]].index(key), band)

    def _value_axis(self, node: gs.Node, own: int) -> int:
        """Return the axis of the keys in what weights are multiplied with."""
        if node.op == "MatMul":
            return len(node.inputs[1].shape or ()) - 2
        letters = _letters(node)
        key, row = letters[own][-1], letters[own][-2]
        if key not in letters[1 - own] or row in letters[1 - own] or row not in letters[2]:
            raise NotAttentionError(f"{node.name} is not a product of weights and values")
        return letters[1 - own].index(key)

    def _column(self, node: gs.Node, place: int, axis: int, band: Band) -> None:
        """Note what a node reads of each key."""
        tensor = node.inputs[place]
        if self.sizes.axis(tensor) != axis or tensor.name in self._positions:
            raise NotAttentionError(f"{tensor.name} is not a value of each key")
        known = band.columns.setdefault(tensor.name, BandColumn(tensor, axis))
        if known.axis != axis:
            raise NotAttentionError(f"{tensor.name} is read along two axes")

    def _readers(self, node: gs.Node) -> list[gs.Node]:
        """Return the nodes that read the values of pairs that a node makes."""
        found = []
        for tensor in node.outputs:
            if not self.sizes.is_pair(tensor):
                continue
            if id(tensor) in self._outputs or any(n.op in SIZES_ONLY for n in tensor.outputs):
                raise NotAttentionError(f"{tensor.name} is an output, or its sizes are read")
            found += tensor.outputs
        return found

    def _rows(self, band: Band) -> int:
        """Return how many earlier tokens count.

        Raises:
            NotAttentionError: later tokens count, or the number has no bound.
        """
        # Entries change only where a mask or a triangle does: beyond these reaches they are
        # constant.
        reach = sum(mask.reach for _, mask in band.masks.values()) + 2
        reach += sum(abs(k) + 1 for k in band.diagonals.values())
        distances = np.arange(-reach, reach + 1)
        known = {name: mask.at(distances) * 1.0 for name, (_, mask) in band.masks.items()}
        multiples = dict[str, Multiple]()
        for node in band.nodes:
            if self.sizes.is_pair(node.outputs[0]):
                name, given = node.outputs[0].name, self._given(node, known, len(distances))
                kept = self._kept(node, band, distances)
                made = self._entries(node, given, kept)
                multiple = multiples[name] = multiple_of(node, given, multiples, kept)
                if multiple.of in known and node.op in ("Add", "Sub") and multiple.is_selection:
                    # Two selections of one value may cancel each other: data are finite.
                    made = np.where(multiple.factors == 0, 0.0, known[multiple.of])
                    band.selections[name] = multiple.of, multiple.at(reach)
                known[name] = made
        seen = np.zeros(len(distances), bool)
        for tensor, op in band.neutral:
            values = known[tensor.name]
            # An unknown entry is NaN, which compares false: it is seen.
            seen |= ~(values <= EXCLUDED if op in LEAST else values == 0)
            if op in LEAST and values[reach] <= EXCLUDED:
                raise NotAttentionError("the first token does not see itself, so that all are seen")
        places = distances[seen]
        # A distance seen at the end of the reach is seen however far it is.
        if not places.size or places[0] < 0 or seen[-1]:
            raise NotAttentionError("it does not see the last tokens and only those")
        if not places[-1]:
            raise NotAttentionError("it sees its own token alone, for which no row is kept")
        if len(places) == 1 and len(band.nodes) == 1 and values[seen] == 1:
            raise NotAttentionError("it delays values by a number of tokens")
        return int(places[-1])

    def _given(self, node: gs.Node, known: dict[str, Entries], count: int) -> list[Entries]:
        """Return the entries of what a node reads, as far as they are of pairs."""
        if node.op in CONTRACTIONS:
            return [np.full(count, UNKNOWN)] * len(node.inputs)
        tensors = node.inputs[:1] if node.op == "Trilu" else node.inputs
        return [self._of(tensor, known, count) for tensor in tensors]

    def _kept(self, node: gs.Node, band: Band, distances: np.ndarray) -> np.ndarray:
        """Return at which distances a triangle keeps its entries; other nodes keep all."""
        if node.op != "Trilu":
            return np.ones(len(distances), bool)
        # Column s of row t is above diagonal k where s - t >= k.
        k, upper = band.diagonals[node.name], node.attrs.get("upper", 1)
        return -distances >= k if upper else -distances <= k

    def _entries(self, node: gs.Node, given: list[Entries], kept: np.ndarray) -> Entries:
        """Return the entries of a value of pairs that a node makes."""
        if node.op in CONTRACTIONS:
            return given[0]
        return np.where(kept, given[0], 0.0) if node.op == "Trilu" else made_of(node, given)

    def _of(self, tensor: gs.Tensor, known: dict[str, Entries], count: int) -> Entries:
        if tensor.name in known:
            return known[tensor.name]
        number = self.evaluator.values.numbers(tensor)
        form = self.evaluator.form(tensor) if number is None else None
        value = form.scalar if form is not None else None
        if number is not None and number.size == 1:
            value = float(number.item())
        return np.full(count, UNKNOWN if value is None else value)


def _letters(node: gs.Node) -> list[str]:
    """Return the letters of the two inputs of an Einsum and of its output; none of others."""
    left, arrow, out = node.attrs["equation"].replace(" ", "").partition("->")
    terms = [*left.split(","), out]
    single = all(len(set(term)) == len(term) for term in terms)
    return terms if arrow and "." not in left and len(terms) == 3 and single and min(terms) else []
