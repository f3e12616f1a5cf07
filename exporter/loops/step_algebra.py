"""A step that is linear in its states, S' = L S + c: the parts of its values, as nodes of a step.

    s' = L s + c               ->   L e for some given e, and c
    s' = s + z (v - s)         ->   1 - z and z v: r and c of r s + c, from the one e = 1
    y = q (g + h)              ->   q g and q h: what is left where all other states are zero

Every value that reads states is followed as a sum of terms. What does not read them is read where
it is computed, and what is zero is not written.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import chain, count
from typing import TypeAlias

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.contract import NoMatchError
from linexport.graph.copies import disconnect
from linexport.graph.edit import nodes_behind, producer
from linexport.graph.folding import fold
from linexport.graph.operators import BODIES, ELEMENTWISE, SIZES_ONLY, is_linear, typed_like_output
from linexport.graph.partial_eval import Values
from linexport.graph.scan_body import StepStates
from linexport.loops.step_nodes import broadcast, inferred

Terms: TypeAlias = "tuple[tuple[float, gs.Tensor | None], ...]"
"""A sum of values, each with its sign; None is 1. Without terms it is zero."""

SIGN = {"Identity": 1.0, "Add": 1.0, "Sum": 1.0, "Neg": -1.0, "Sub": -1.0}
"""Operators that are sums, and the sign of the last value that they add up."""

ENTRYWISE = {*SIGN, "Mul", "Where"}
"""Operators that are followed where a step must act entry by entry."""


class StepAlgebra(StepStates):
    """Parts of the values of a step.

    Args:
        body: of a Scan, its nodes in the order of evaluation.
        states: those of its inputs that are states, the first ones.
        alike: a state; only values made of it entry by entry, of its shape, are followed.

    Attributes:
        nodes: what was written, which is not in the body yet.
    """

    def __init__(
        self, body: gs.Graph, states: Sequence[gs.Tensor], alike: gs.Tensor | None = None
    ) -> None:
        super().__init__(body, states)
        self.nodes: list[gs.Node] = []
        self._alike, self._values = alike, Values.of_graph(body)
        self._dtype = (body.inputs[0] if alike is None else alike).dtype
        tensors = chain.from_iterable((*n.inputs, *n.outputs) for n in body.nodes)
        self._names = {t.name for t in (*body.inputs, *tensors)}
        self._numbers: dict[float, gs.Constant] = {}
        self._made: dict[Hashable, Sequence[gs.Tensor]] = {
            _key_of(n.op, n.attrs, n.inputs): n.outputs for n in body.nodes if n.op not in BODIES
        }

    def linear(self, given: Sequence[gs.Tensor | None]) -> list[gs.Tensor | None]:
        """Return L e; None is zero.

        Raises:
            NoMatchError: an operator is not followed.
        """
        terms: list[Terms] = [() if x is None else ((1.0, x),) for x in given]
        return self._after(terms, added=False)

    def added(self) -> list[gs.Tensor | None]:
        """Return c; None is zero.

        Raises:
            NoMatchError: see ``linear``.
        """
        return self._after([()] * self.count, added=True)

    def _after(self, given: Sequence[Terms], added: bool) -> list[gs.Tensor | None]:
        own, after = self.body.inputs[: self.count], self.body.outputs[: self.count]
        names = (t.name for t in own)
        found = self.parts(after, dict(zip(names, given, strict=True)), added)
        return [self.tensor(terms) if terms else None for terms in found]

    def parts(
        self, targets: Sequence[gs.Tensor], given: Mapping[str, Terms], added: bool
    ) -> list[Terms]:
        """Return what some values are where others are given.

        Args:
            targets: the values.
            given: terms in the place of states, or of values that are of states.
            added: whether what is of no state is added, or zero.

        Raises:
            NoMatchError: an operator is not followed.
        """
        known = self.followed(targets, given, added)
        lost = [t.name for t in targets if self.states_of(t) and t.name not in known]
        if lost:
            raise NoMatchError(f"{lost[0]} is not followed as a linear function of the states")
        return [self._terms(t, known, added) for t in targets]

    def followed(
        self, targets: Iterable[gs.Tensor], given: Mapping[str, Terms], added: bool
    ) -> dict[str, Terms]:
        """Return the values behind some that are followed, see ``parts``."""
        known, needed = dict(given), set(map(id, nodes_behind(targets)))
        for node in self.body.nodes:
            own = [t.name for t in node.inputs if self.states_of(t)]
            made = [t.name for t in node.outputs]
            if id(node) not in needed or made[0] in known or node.op in SIZES_ONLY:
                continue
            # One operand that is not followed makes the result something else.
            if own and all(name in known for name in own) and self._is_whole(node):
                found = self._part(node, known, added)
                known |= {} if found is None else dict(zip(made, found, strict=True))
        return known

    def _is_whole(self, node: gs.Node) -> bool:
        # Another shape moves, repeats or sums entries: what e = 1 becomes would not be the factor.
        return self._alike is None or (
            node.op in ENTRYWISE and node.outputs[0].shape == self._alike.shape
        )

    def _terms(self, tensor: gs.Tensor, known: Mapping[str, Terms], added: bool) -> Terms:
        if tensor.name in known:
            return known[tensor.name]
        return ((1.0, tensor),) if added and not self._values.is_zero(tensor) else ()

    def _part(
        self, node: gs.Node, known: Mapping[str, Terms], added: bool
    ) -> Sequence[Terms] | None:
        """Return what a node computes of parts of its inputs; None where it is not followed."""
        taken = [bool(self.states_of(t)) for t in node.inputs]
        parts = [self._terms(t, known, added) for t in node.inputs]
        if node.op in SIGN:
            # L (a - b) = L a - L b; an addend without a state is a part of c, and is zero in L e.
            last = tuple((SIGN[node.op] * sign, x) for sign, x in parts[-1])
            return [tuple(chain(*parts[:-1], last))]
        # A choice by a condition without a state is linear in the values that it is between.
        if node.op == "Where" and not taken[0]:
            return [self._choice(node, *parts[1:])]
        if node.op == "Concat":
            return self._concatenated(node, parts)
        # A product is linear in one factor while the other depends on no state.
        if sum(taken) != 1 or not is_linear(node.op, taken):
            return None
        place = taken.index(True)
        # Products with zero, and zeros moved, are zero.
        return self._image(node, place, parts[place]) if parts[place] else [()] * len(node.outputs)

    def _image(self, node: gs.Node, place: int, terms: Terms) -> Sequence[Terms] | None:
        """Return what a linear operator makes of a sum in the place of one of its inputs."""
        sign, own = self._single(terms)
        if node.op == "Mul" and _is_one(own, node.inputs[1 - place]):
            return [((sign, node.inputs[1 - place]),)]
        own = self._number(1.0) if own is None else own
        if node.op not in ELEMENTWISE and not _is_alike(own, node.inputs[place]):
            return None  # of a smaller part it would move or sum other entries
        inputs = [own if i == place else t for i, t in enumerate(node.inputs)]
        return [((sign, made),) for made in self._copy(node, inputs)]

    def _choice(self, node: gs.Node, first: Terms, second: Terms) -> Terms:
        """Return a Where of two sums; if one of them is zero, a product with a 0/1 mask."""
        condition = node.inputs[0]
        if not (first and second):
            # Where(k, x, 0) = Where(k, 1, 0) x for finite x, and a product joins other factors of
            # the state.
            if not (first or second):
                return ()
            numbers = [self._number(float(bool(terms))) for terms in (first, second)]
            (mask,) = self._write("Where", [condition, *numbers])
            sign, own = self._single(first or second)
            return ((sign, mask if own is None else self._write("Mul", [own, mask])[0]),)
        sides = [self.tensor(terms) for terms in (first, second)]
        # A choice between equal values is that value.
        same = sides[0] is sides[1]
        return ((1.0, sides[0] if same else self._write("Where", [condition, *sides])[0]),)

    def _single(self, terms: Terms) -> tuple[float, gs.Tensor | None]:
        """Return a sum as one term: (x + y) f takes one product, x f + y f two."""
        return terms[0] if len(terms) == 1 else (1.0, self.tensor(terms))

    def _concatenated(self, node: gs.Node, parts: Sequence[Terms]) -> Sequence[Terms] | None:
        """Return parts next to each other, with zeros of their sizes where one is zero."""
        given = [self.tensor(terms) if terms else None for terms in parts]
        pairs = [(x, t) for x, t in zip(given, node.inputs, strict=True) if x is not None]
        if not pairs:
            return [()]
        (like, whole), *_ = pairs
        missing = [t for t, x in zip(node.inputs, given, strict=True) if x is None]
        batches = {str(list(x.shape or ())[:1]) for x, _ in pairs}
        # Zeros next to a part of another size, and parts that broadcast, are not written.
        if any(t.shape != whole.shape for t in missing) or len(batches) > 1:
            return None
        if not all(_is_alike(x, t) for x, t in pairs):
            return None
        zeros = self._write("Mul", [like, self._number(0.0)])[0] if missing else like
        made = self._copy(node, [zeros if x is None else x for x in given])
        return [((1.0, made[0]),)]

    def tensor(self, terms: Terms) -> gs.Tensor:
        """Return a sum as one tensor."""
        exponent = _exponent(terms)
        if exponent is not None:
            stored = self._constant("exponent", np.asarray(exponent, self._dtype))
            return self._write("Exp", [stored])[0]
        found: gs.Tensor | None = None
        # Positive terms first: the sum then begins without a Neg.
        for sign, tensor in sorted(terms, key=lambda term: -term[0]):
            one = self._number(1.0) if tensor is None else tensor
            if found is None:
                found = one if sign > 0 else self._write("Neg", [one])[0]
            else:
                found = self._write("Add" if sign > 0 else "Sub", [found, one])[0]
        return self._number(0.0) if found is None else found

    def affine(self, rate: Terms, state: gs.Tensor, added: Terms) -> gs.Tensor:
        """Return r s + c."""
        found = self._write("Mul", [self.tensor(rate), state], like=[state])[0]
        if not added:
            return found
        return self._write("Add", [found, self.tensor(added)], like=[state])[0]

    def _copy(self, node: gs.Node, inputs: list[gs.Tensor]) -> Sequence[gs.Tensor]:
        """Write a node of the same kind that reads other values."""
        before, after = (list(t.shape or ()) for t in (node.inputs[0], node.outputs[0]))
        first = node.op == "Reshape" and bool(before) and before[:1] == after[:1]
        if first and not any(isinstance(n, str) for n in after[1:]):
            # The batch keeps its size, whatever that is of the part.
            sizes = self._constant("sizes", np.asarray([0, *after[1:]], np.int64))
            return self._write("Reshape", [inputs[0], sizes], {}, node.outputs)
        return self._write(node.op, inputs, node.attrs, node.outputs)

    def _write(
        self,
        op: str,
        inputs: Sequence[gs.Tensor],
        attrs: Mapping[str, object] | None = None,
        like: Sequence[gs.Tensor] = (),
    ) -> Sequence[gs.Tensor]:
        """Return what a node computes; there is one node of every kind with the same inputs.

        Args:
            op: its operator.
            inputs: what it reads.
            attrs: its attributes.
            like: what a node of this kind gives for other inputs.
        """
        key = _key_of(op, attrs or {}, inputs)
        if key not in self._made:
            alike = inputs[next(iter(typed_like_output(op)), 0)].dtype
            types = [t.dtype for t in like] or [None]
            outputs = [gs.Variable(self._name(op), dtype or alike) for dtype in types]
            node = gs.Node(op, outputs[0].name, dict(attrs or {}), list(inputs), outputs)
            # An Exp is written to keep digits that its value has not, see ``_exponent``.
            values = None if op == "Exp" else fold(node, self.body.opset)
            if values is None:
                _write_shapes(node, like)
                self.nodes.append(node)
            else:
                disconnect([node])
            self._made[key] = outputs if values is None else values
        return self._made[key]

    def _number(self, value: float) -> gs.Tensor:
        if value not in self._numbers:
            self._numbers[value] = self._constant("number", np.asarray(value, self._dtype))
        return self._numbers[value]

    def _constant(self, stem: str, values: np.ndarray) -> gs.Constant:
        return gs.Constant(self._name(stem), values)

    def _name(self, stem: str) -> str:
        first = f"{self.body.inputs[0].name}/{stem}"
        name = next(n for i in count(len(self._names)) if (n := f"{first}_{i}") not in self._names)
        self._names.add(name)
        return name


def _write_shapes(node: gs.Node, like: Sequence[gs.Tensor]) -> None:
    """Write the shapes of a node's outputs; ``like`` are those of such a node of whole values."""
    shapes = [None if t.shape is None else list(t.shape) for t in node.inputs]
    shape = broadcast(shapes) if node.op in ELEMENTWISE else None
    found = inferred(node, {}) if shape is None else {node.outputs[0].name: shape}
    # The batch is that of what is read, which is 1 of a state that is the same for all.
    wide = any(isinstance(n, str) for shape in shapes for n in shape or ())
    for place, tensor in enumerate(node.outputs):
        if found is not None:
            tensor.shape = found[tensor.name]
        elif like and (stated := like[place].shape):
            tensor.shape = [n if wide or isinstance(n, int) else 1 for n in stated]


def _is_one(own: gs.Tensor | None, factor: gs.Tensor) -> bool:
    """Return whether a product with a factor is that factor; None is 1."""
    if own is None:
        return True
    if not isinstance(own, gs.Constant) or factor.shape is None or (own.values != 1).any():
        return False
    return broadcast([list(own.shape), list(factor.shape)]) == list(factor.shape)


def _is_alike(part: gs.Tensor, whole: gs.Tensor) -> bool:
    """Return whether a part has the shape of the whole value, but for a batch of 1, if known."""
    if part.shape is None or whole.shape is None:
        return True
    pairs = zip(part.shape, whole.shape, strict=False)
    same = all(a == b or (a == 1 and isinstance(b, str)) for a, b in pairs)
    return same and len(part.shape) == len(whole.shape)


def _exponent(terms: Terms) -> np.ndarray | None:
    """Return log(1 - z) of 1 - z, for stored z between 0 and 1; None of other sums.

    The next number below 1 in float32 is 6e-8 away: 1 - 1e-4 would fade in 9,996 tokens.
    """
    if len(terms) != 2 or [c for c, x in terms if x is None] != [1.0]:
        return None
    sign, z = next((c, x) for c, x in terms if x is not None)
    if not isinstance(z, gs.Constant) or z.values.dtype.kind != "f":
        return None
    kept = sign * np.asarray(z.values, np.float64)
    # exp(log1p(-z)) = 1 - z, and log1p in float64 keeps the digits of z that 1 - z rounds away.
    return np.log1p(kept) if ((kept > -1) & (kept < 0)).all() else None


def _key_of(op: str, attrs: Mapping[str, object], inputs: Iterable[gs.Tensor]) -> Hashable:
    return (op, *sorted((name, str(x)) for name, x in attrs.items()), *map(_key, inputs))


def _key(tensor: gs.Tensor) -> Hashable:
    """Return a key by which values are compared; equal numbers have one key in every type."""
    while (cast := producer(tensor, "Cast")) is not None and not cast.inputs[0].inputs:
        tensor = cast.inputs[0]
    if isinstance(tensor, gs.Constant) and tensor.values.size == 1:
        return float(tensor.values.item()), tensor.values.shape
    return tensor.name
