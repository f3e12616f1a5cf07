"""Exponentials of scores over the last tokens, and the sums that they are made for.

    a_ts = f_t exp(c q_t.k_s - m_t)      0 <= t - s < w, and else 0      m_t = 0 or the maximum
    sum_s a_ts v_s,  sum_s a_ts,  m_t

or softmax of the scores, whose sums are divided, and log sum_s exp(c q_t.k_s). Such a band is one
``WindowAttention``, however it is masked: what masks let through is read by ``bands``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.edit import producer
from linexport.graph.operators import CONTRACTIONS
from linexport.graph.partial_eval import stated_sizes
from linexport.match.errors import NotAttentionError
from linexport.match.search.bands import Band, BandReader

FLOATING = (np.dtype(np.float32), np.dtype(np.float16))

SAME = ("Identity", "IsNaN")
"""Operators on values of pairs that are followed as if they were not there."""


@dataclass(frozen=True)
class BandWeights:
    """Value of pairs: scores, or exponentials of them.

    Attributes:
        scale: c.
        shifted: the maximum of the row is subtracted.
        exponential: the exponential was taken.
        softmax: and was divided by the sum of the row.
        factors: numbers of each query, or of all, that it is multiplied with.
    """

    scale: float = 1.0
    shifted: bool = False
    exponential: bool = False
    softmax: bool = False
    factors: tuple[gs.Tensor, ...] = ()


@dataclass(frozen=True)
class WindowEnd:
    """Value of each query that a band makes.

    Attributes:
        tensor: the value.
        weights: what it sums, or has the maximum of.
        letters: its axes, b (h) m e for a sum of values; "" for a sum of weights or a maximum.
        kept: the axis of keys remains, with size 1.
        quantity: "sum" of weights or values, or of scores "maximum" or "logarithm", that of the sum
            of their exponentials.
    """

    tensor: gs.Variable
    weights: BandWeights
    letters: str
    kept: bool
    quantity: Literal["sum", "maximum", "logarithm"] = "sum"


@dataclass
class WindowSoftmax:
    """A band of exponentials.

    Attributes:
        band: its nodes and columns.
        query, key, value: tensors and the letters of their axes: b, h, m (query), n (key), d, e.
        ends: sums of values, sums of weights and maxima.
        scale: c.
    """

    band: Band
    query: tuple[gs.Tensor, str]
    key: tuple[gs.Tensor, str]
    value: tuple[gs.Tensor, str]
    ends: list[WindowEnd] = field(default_factory=list)
    scale: float = 1.0

    @property
    def window(self) -> int:
        """Tokens that a query sees."""
        return self.band.rows + 1


def read(reader: BandReader, band: Band) -> WindowSoftmax:
    """Return a band as exponentials of scores.

    Raises:
        NotAttentionError: it is another one.
    """
    return _Reading(reader, band).run()


class _Reading:
    """Follows the values of pairs of one band."""

    def __init__(self, reader: BandReader, band: Band) -> None:
        self.reader, self.sizes, self.band = reader, reader.sizes, band
        self.known: dict[str, BandWeights] = {}
        self.maxima: dict[str, str] = {}
        self.ends: list[WindowEnd] = []
        self.value: tuple[gs.Tensor, str] | None = None

    def run(self) -> WindowSoftmax:
        scores = [n for n in self.band.nodes if self._makes_scores(n)]
        if len(scores) != 1:
            raise NotAttentionError(f"it has {len(scores)} products of queries and keys")
        terms, out = _letters(scores[0])
        if len(out) not in (3, 4) or len(set(out)) != len(out):
            raise NotAttentionError(f"{scores[0].name} has other axes than heads and tokens")
        names = dict(zip(out, "bhmn" if len(out) == 4 else "bmn", strict=True))
        own = next(i for i, term in enumerate(terms) if out[-1] in term)
        query, key = (
            (scores[0].inputs[i], _renamed(terms[i], {**names, _summed(terms, out): "d"}))
            for i in (1 - own, own)
        )
        _check_letters(query[1], "bhmd" if len(out) == 4 else "bmd")
        _check_letters(key[1], "bhnd" if len(out) == 4 else "bnd")
        self.known[scores[0].outputs[0].name] = BandWeights()
        for node in self.band.nodes:
            if node is not scores[0]:
                self._follow(node)
        if self.value is None or not any(end.letters for end in self.ends):
            raise NotAttentionError("it sums no values")
        scales = {end.weights.scale for end in self.ends}
        if len(scales) != 1:
            raise NotAttentionError("its sums are of scores with several scales")
        return WindowSoftmax(self.band, query, key, self.value, self.ends, scales.pop())

    def _makes_scores(self, node: gs.Node) -> bool:
        pairs = [t for t in node.inputs if self.sizes.is_pair(t)]
        return node.op in CONTRACTIONS and not pairs and self.sizes.is_pair(node.outputs[0])

    def _follow(self, node: gs.Node) -> None:
        output = node.outputs[0]
        if not self.sizes.is_pair(output):
            self._end(node)
            return
        given = [(i, self.known[t.name]) for i, t in enumerate(node.inputs) if t.name in self.known]
        if not given:
            raise NotAttentionError(f"{node.name} does not read the scores")
        place, weights = given[-1]
        if len({w for _, w in given}) != 1:
            raise NotAttentionError(f"{node.name} combines two values of pairs")
        others = [t for i, t in enumerate(node.inputs) if i not in {i for i, _ in given}]
        self.known[output.name] = self._changed(node, place, weights, others)

    def _changed(
        self, node: gs.Node, place: int, weights: BandWeights, others: list[gs.Tensor]
    ) -> BandWeights:
        """Return weights behind a node that reads them at a place."""
        masks = all(t.name in self.band.masks or self._number(t) is not None for t in others)
        match node.op:
            case "Exp" if not weights.exponential:
                return replace(weights, exponential=True)
            case "Softmax" if not weights.exponential and not weights.shifted:
                return replace(weights, exponential=True, softmax=True)
            case "Sub" if place == 0 and self._is_maximum(others, node.inputs[0]):
                return replace(weights, shifted=True)
            case "Mul" | "Div" if place == 0 or node.op == "Mul":
                return self._multiplied(node, weights, others[0])
            case "Where" | "Trilu" if masks:
                return weights
            case "Add" if others[0].name in self.band.masks:
                return weights
            case op if op in SAME:
                return weights
        raise NotAttentionError(f"values of pairs pass through {node.op} {node.name}")

    def _is_maximum(self, others: list[gs.Tensor], scores: gs.Tensor) -> bool:
        return len(others) == 1 and self.maxima.get(others[0].name) == scores.name

    def _multiplied(self, node: gs.Node, weights: BandWeights, other: gs.Tensor) -> BandWeights:
        if other.name in self.band.masks:
            if node.op == "Mul" and weights.exponential:
                return weights
            raise NotAttentionError(f"{node.name} multiplies scores with a mask")
        number = self._number(other)
        if number is not None and not weights.exponential and number > 0:
            scale = weights.scale * (number if node.op == "Mul" else 1 / number)
            if weights.shifted:
                raise NotAttentionError(f"{node.name} scales scores behind their maximum")
            return replace(weights, scale=scale)
        sizes = stated_sizes(other)
        alone = sizes is not None and (not sizes or sizes[-1].known == 1)
        if node.op == "Mul" and weights.exponential and alone:
            return replace(weights, factors=(*weights.factors, other))
        raise NotAttentionError(f"{node.name} is not followed")

    def _number(self, tensor: gs.Tensor) -> float | None:
        found = self.reader.evaluator.values.numbers(tensor)
        return float(found.item()) if found is not None and found.size == 1 else None

    def _end(self, node: gs.Node) -> None:
        """Note a value of each query."""
        output = node.outputs[0]
        if node.op in CONTRACTIONS:
            terms, out = _letters(node)
            own = next(i for i, t in enumerate(node.inputs) if t.name in self.known)
            weights = self.known[node.inputs[own].name]
            names = dict(
                zip(terms[own], "bhmn"[-4:] if len(terms[own]) == 4 else "bmn", strict=True)
            )
            width = {c: "e" for c in terms[1 - own] if c not in names}
            letters = _renamed(out, {**names, **width})
            value = node.inputs[1 - own], _renamed(terms[1 - own], {**names, **width})
            heads = len(terms[own]) == 4
            _check_letters(letters, "bhme" if heads else "bme")
            _check_letters(value[1], "bhne" if heads else "bne")
            if self.value is not None and self.value != value:
                raise NotAttentionError("it sums several values")
            self.value = value
            self._add(WindowEnd(output, weights, letters, True))
            return
        weights = self.known[node.inputs[0].name]
        kept = bool(node.attrs.get("keepdims", 1))
        if node.op == "ReduceMax" and not weights.exponential and not weights.shifted:
            self.maxima[output.name] = node.inputs[0].name
            inside = {id(n) for n in self.band.nodes}
            if not output.outputs or any(id(n) not in inside for n in output.outputs):
                self._add(WindowEnd(output, weights, "", kept, "maximum"))
            return
        if node.op == "ReduceLogSumExp" and not weights.exponential and not weights.shifted:
            self._add(WindowEnd(output, weights, "", kept, "logarithm"))
            return
        if node.op != "ReduceSum" or weights.softmax:
            raise NotAttentionError(f"its values of pairs are read by {node.op} {node.name}")
        self._add(WindowEnd(output, weights, "", kept))

    def _add(self, end: WindowEnd) -> None:
        if end.quantity == "sum" and not end.weights.exponential:
            raise NotAttentionError("it sums scores, not exponentials of them")
        if np.dtype(end.tensor.dtype) not in FLOATING:
            raise NotAttentionError(f"its sums are of type {end.tensor.dtype}")
        self.ends.append(end)


def _letters(node: gs.Node) -> tuple[list[str], str]:
    """Return the axes of the inputs of a product, and of its output."""
    if node.op == "MatMul":
        ranks = {len(t.shape or ()) for t in (*node.inputs, *node.outputs)}
        if ranks - {3, 4} or len(ranks) != 1:
            raise NotAttentionError(f"{node.name} has inputs of different ranks")
        lead = "xy"[: ranks.pop() - 2]
        return [lead + "ij", lead + "jk"], lead + "ik"
    left, _, out = node.attrs["equation"].replace(" ", "").partition("->")
    return left.split(","), out


def _summed(terms: list[str], out: str) -> str:
    found = [c for c in terms[0] if c in terms[1] and c not in out]
    if len(found) != 1:
        raise NotAttentionError("scores are not products of vectors")
    return found[0]


def _renamed(term: str, names: dict[str, str]) -> str:
    return "".join(names.get(c, "?") for c in term)


def _check_letters(found: str, expected: str) -> None:
    if sorted(found) != sorted(expected):
        raise NotAttentionError(f"a product has the axes {found}; expected {expected} in any order")


def exponential_bands(reader: BandReader) -> Iterator[WindowSoftmax | NotAttentionError]:
    """Yield every band of exponentials, and the reasons why others are none."""
    done = set[int]()
    for node in list(reader.sums()):
        if id(node) in done or producer(node.inputs[0]) is None:
            continue
        try:
            band = reader.read(node)
            done |= {id(n) for n in band.nodes}
            yield read(reader, band)
        except NotAttentionError as reason:
            yield reason
