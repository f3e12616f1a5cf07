"""Softmax attention to tokens up to the query's own, in a graph of standard operators.

    softmax(mask + q k^T) v      mask: 0 where s <= t, or t - w < s <= t, and else minus infinity

The mask may be written in any way that ``distances`` follows, in several parts, and scores may be
scaled or capped. The products are MatMul or Einsum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.edit import is_output, producer
from linexport.graph.monomials import ONE, Size, parse
from linexport.graph.operators import CONTRACTIONS
from linexport.graph.tensors import known_shape
from linexport.match.emit.layout import written_size
from linexport.match.errors import NotAttentionError
from linexport.match.forms.distances import ByDistance, added, condition, window
from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.rules.elementwise import VERY_NEGATIVE
from linexport.match.search.shared_rows import SharedRows, find_shared_rows

LEAST = 1e-3
"""Scores are not scaled by less once they are masked, lest the numbers of masks become small."""

FLOATING = (np.float32, np.float16)


@dataclass(frozen=True)
class ScoreMask:
    """A mask of scores: an input of a node that masks them.

    ``fill`` is what is added to scores of keys that are not seen; None where the input is a
    condition, true for the keys that ``keeps`` is of.
    """

    node: gs.Node
    place: int
    fill: float | None = None
    keeps: bool = True


@dataclass(frozen=True)
class Rows:
    """Keys or values that a product reads.

    Attributes:
        node: the product.
        place: of the tensor among its inputs.
        sizes: of the tensor: batch, numbers, and the tokens.
        axis: of the tokens.
        merged: heads that are in the first axis, behind the batch; 1 where it is the batch alone.
        shared: what they are copies of, where several heads of queries share one of these.
    """

    node: gs.Node
    place: int
    sizes: tuple[int | str, ...]
    axis: int
    merged: int
    shared: SharedRows | None


@dataclass(frozen=True)
class MaskedSoftmax:
    """Softmax attention of queries to the tokens up to their own.

    Attributes:
        softmax: the node.
        key, value: what is kept.
        dtype: of both.
        before, after: values between the products with keys and with values, from the softmax on
            to each of them, (.., T, T).
        sizes: of these, (.., T, T).
        masks: of the scores.
        scale: what scores are multiplied by; None where they are not only masked and scaled.
        window: the number of tokens that a query sees; None for all.
    """

    softmax: gs.Node
    key: Rows
    value: Rows
    dtype: Any
    before: list[gs.Tensor]
    after: list[gs.Tensor]
    sizes: tuple[int | str, ...]
    masks: list[ScoreMask]
    scale: float | None
    window: int | None


class SoftmaxReader:
    """Reads the attention around a Softmax."""

    def __init__(self, graph: gs.Graph, tokens: str) -> None:
        self.graph, self.evaluator = graph, Evaluator(graph)
        self.tokens = parse(tokens)
        given = next(t for t in graph.inputs if tokens in (t.shape or ()))
        self.batch = parse(known_shape(given)[0])

    def read(self, softmax: gs.Node) -> MaskedSoftmax:
        """Return it.

        Raises:
            NotAttentionError: it is another attention, or none.
        """
        scores = softmax.inputs[0]
        sizes = self._sizes(scores)
        if softmax.attrs.get("axis", -1) not in (-1, len(sizes) - 1):
            raise NotAttentionError("it is not along the last axis")
        if sizes[-2:] != [self.tokens] * 2:
            raise NotAttentionError("its scores are not of all pairs of tokens")
        before, masks, seen, scale = self._before(scores)
        after, output = self._after(softmax.outputs[0])
        key = self._key(before[-1].inputs[0], len(sizes))
        value = self._value(output.inputs[0], after[-1], len(sizes))
        if key.sizes[0] != value.sizes[0] or key.merged != value.merged:
            raise NotAttentionError("its keys and values are not of one batch")
        if output.dtype not in FLOATING:
            raise NotAttentionError(f"its values are of type {output.dtype}")
        tokens = window(seen)
        if tokens == 1:
            raise NotAttentionError("every token sees itself alone")
        return MaskedSoftmax(
            softmax,
            key,
            value,
            output.dtype,
            before,
            after,
            tuple(written_size(size) for size in sizes),
            masks,
            scale,
            tokens,
        )

    def _key(self, node: gs.Node, rank: int) -> Rows:
        """Return the keys of the product that gives scores (B, .., T, S)."""
        if node.op == "MatMul":
            return self._rows(node, 1, -1, rank)
        terms, out = _letters(node)
        place = next(i for i, term in enumerate(terms) if out[-1] in term)
        rows = self._rows(node, place, terms[place].index(out[-1]))
        alone = terms[place][0] == out[0] and out[-2] not in terms[place] and len(out) == rank
        if not alone or out[-1] in terms[1 - place]:
            raise NotAttentionError(f"{node.name} is not a product of queries and keys")
        return rows

    def _value(self, node: gs.Node, weights: gs.Tensor, rank: int) -> Rows:
        """Return the values that are multiplied with weights (B, .., T, S)."""
        if node.op == "MatMul":
            return self._rows(node, 1, -2, rank)
        (terms, out), own = _letters(node), int(node.inputs[1] is weights)
        token = terms[own][-1]
        rows = self._rows(node, 1 - own, terms[1 - own].find(token))
        if token in out or terms[1 - own][0] != terms[own][0]:
            raise NotAttentionError(f"{node.name} is not a product of weights and values")
        return rows

    def _rows(self, node: gs.Node, place: int, axis: int, rank: int | None = None) -> Rows:
        """Return what a product reads, whose tokens are along an axis."""
        tensor = node.inputs[place]
        form, sizes = self.evaluator.form(tensor), self._sizes(tensor)
        axis %= len(sizes)
        numbers = [size.known for i, size in enumerate(sizes) if i not in (0, axis)]
        heads = sizes[0].divided(self.batch)
        if (
            not axis
            or sizes[axis] != self.tokens
            or None in numbers
            or rank not in (None, len(sizes))
        ):
            raise NotAttentionError(f"{tensor.name} has the sizes {[str(size) for size in sizes]}")
        first = [] if form is None else [a.size for a in form.dims[0]]
        if heads is None or heads.known is None or (heads != ONE and first != [self.batch, heads]):
            raise NotAttentionError(f"the first axis of {tensor.name} is not the batch, then heads")
        own = [written_size(size) for size in (self.batch, *sizes[1:])]
        shared = find_shared_rows(self.evaluator, tensor) if node.op == "MatMul" else None
        return Rows(node, place, tuple(own), axis, heads.known, shared)

    def _sizes(self, tensor: gs.Tensor) -> list[Size]:
        found = self.evaluator.sizes(tensor)
        if found is None or len(found) < 3:
            raise NotAttentionError(f"the sizes of {tensor.name} are not known")
        return found

    def _before(
        self, x: gs.Tensor
    ) -> tuple[list[gs.Tensor], list[ScoreMask], list[ByDistance], float | None]:
        """Return the values from the softmax back to the product, and what is done to them.

        Returns:
            The values, the masks, what these keep, and the factor of scores, see ``MaskedSoftmax``.
        """
        path, masks, seen, gain, scale = [x], list[ScoreMask](), list[ByDistance](), 1.0, 1.0
        capped = False
        while (node := producer(x)) is not None and node.op not in CONTRACTIONS:
            if len(x.outputs) != 1 or is_output(self.graph, x):
                raise NotAttentionError(f"{x.name} is read elsewhere, too")
            factor = self._factor(node)
            if node.op in ("Identity", "Tanh") or factor is not None:
                # Masks before a Tanh, or before numbers below zero, would not be ones behind it.
                gain *= factor[1] if factor else float(node.op == "Identity")
                scale *= factor[1] if factor else 1.0
                capped |= node.op == "Tanh"
                x = factor[0] if factor else node.inputs[0]
            elif gain < LEAST:
                raise NotAttentionError(f"its mask is not what the softmax gets: {node.name}")
            elif node.op == "Where":
                x = self._filled(node, masks, seen)
            elif node.op == "Add":
                x = self._added(node, masks, seen)
            else:
                raise NotAttentionError(f"its scores pass through {node.op}")
            path.append(x)
        if node is None or len(x.outputs) != 1 or is_output(self.graph, x):
            raise NotAttentionError("its scores are not the product of queries and keys")
        return path, masks, seen, None if capped else scale

    def _factor(self, node: gs.Node) -> tuple[gs.Tensor, float] | None:
        """Return what a node multiplies with one number, or divides by one, and the factor."""
        if node.op not in ("Mul", "Div"):
            return None
        for place, (x, number) in enumerate((node.inputs, node.inputs[::-1])):
            value = self.evaluator.values.numbers(number)
            if value is not None and value.size == 1 and value.item():
                if node.op == "Mul":
                    return x, float(value.item())
                # A number over x is not a multiple of x.
                return None if place else (x, 1 / value.item())
        return None

    def _filled(self, node: gs.Node, masks: list[ScoreMask], seen: list[ByDistance]) -> gs.Tensor:
        """Return the scores of Where(mask, scores, -inf), or of one the other way round."""
        truth, *sides = node.inputs
        for keeps, (x, fill) in ((True, sides), (False, sides[::-1])):
            form = self.evaluator.form(fill)
            if form is not None and form.scalar is not None and form.scalar <= VERY_NEGATIVE:
                self._check_pairs(truth)
                seen.append(condition(self.evaluator, truth, keeps))
                masks.append(ScoreMask(node, 0, None, keeps))
                return x
        raise NotAttentionError(f"{node.name} fills scores with other numbers than minus infinity")

    def _added(self, node: gs.Node, masks: list[ScoreMask], seen: list[ByDistance]) -> gs.Tensor:
        """Return the scores of scores + mask."""
        reasons = []
        for place, mask in enumerate(node.inputs):
            try:
                self._check_pairs(mask)
                keeps, fill = added(self.evaluator, mask)
            except NotAttentionError as reason:
                reasons.append(str(reason))
                continue
            seen.append(keeps)
            masks.append(ScoreMask(node, place, fill))
            return node.inputs[1 - place]
        raise NotAttentionError(f"what {node.name} adds is not a mask: {' or '.join(reasons)}")

    def _check_pairs(self, mask: gs.Tensor) -> None:
        sizes = self.evaluator.sizes(mask)
        if sizes is None or sizes[-2:] != [self.tokens] * 2:
            raise NotAttentionError(f"{mask.name} is not of all pairs of tokens")

    def _after(self, x: gs.Tensor) -> tuple[list[gs.Tensor], gs.Tensor]:
        """Return the values from the softmax to the product with values, and that product."""
        path = [x]
        while True:
            readers = list(x.outputs)
            cleaned = self._cleaned(x, readers)
            if cleaned is not None:
                path += cleaned
                x = cleaned[-1]
                continue
            if len(readers) != 1 or is_output(self.graph, x):
                raise NotAttentionError("its weights are not read by one product alone")
            (node,) = readers
            if node.op == "Einsum" or (node.op == "MatMul" and node.inputs[0] is x):
                return path, node.outputs[0]
            if node.op != "Identity":
                raise NotAttentionError(f"its weights pass through {node.op}")
            x = node.outputs[0]
            path.append(x)

    def _cleaned(self, x: gs.Tensor, readers: list[gs.Node]) -> list[gs.Tensor] | None:
        """Return the values of Where(IsNaN(x), 0, x), which torch puts after a softmax."""
        if sorted(n.op for n in readers) != ["IsNaN", "Where"] or is_output(self.graph, x):
            return None
        nan, choose = sorted(readers, key=lambda n: n.op)
        number = self.evaluator.values.numbers(choose.inputs[1])
        own = choose.inputs[0] is nan.outputs[0] and choose.inputs[2] is x
        if not own or number is None or number.size != 1 or len(nan.outputs[0].outputs) != 1:
            return None
        return [nan.outputs[0], choose.outputs[0]]


def _letters(node: gs.Node) -> tuple[list[str], str]:
    """Return the letters of the two inputs of an Einsum, and of its output."""
    left, arrow, out = node.attrs["equation"].replace(" ", "").partition("->")
    terms = left.split(",")
    single = all(len(set(term)) == len(term) for term in (*terms, out))
    if not arrow or "." in left or len(terms) != 2 or not single or len(out) < 2:
        raise NotAttentionError(f"{node.name} is not a product of two tensors")
    return terms, out
