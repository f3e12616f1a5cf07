"""Sums and choices that a Scan's step makes of its state -> one decay of the state, and one sum.

    S + z (v - S)           ->   (1 - z) S + z v       moving averages, ``torch.lerp``
    S - a S + b             ->   (1 - a) S + b
    a (S + b)               ->   a S + a b
    Where(c, 0, a S + b)    ->   Where(c, 0, a) S + Where(c, 0, b)
    a S + b + c             ->   a S + (b + c)                  but for outer products, k v^T

z, v, a, b and c are of no state. Every value that is r S + b, element by element, is followed by
its r and b; what mixes elements of the state, such as a delta rule, is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.copies import disconnect
from linexport.graph.edit import original_of, producer
from linexport.graph.operators import COPIES, ELEMENTWISE, LAYOUT, PRODUCTS, SIZES_ONLY
from linexport.graph.partial_eval import Values
from linexport.graph.tensors import known_shape
from linexport.loops.step_nodes import broadcast, numbers_in

PASS_ON = COPIES | LAYOUT | {"Neg"}
"""Operators that an outer product remains one behind."""

Terms = tuple[tuple[float, gs.Tensor | None], ...]
"""A sum of values, each with its sign or coefficient; None is 1."""


@dataclass(frozen=True)
class _Affine:
    """A value r S + b.

    Attributes:
        rate: the terms of r.
        added: the terms of b, none of which is None.
        joined: whether the step writes it otherwise.
    """

    rate: Terms
    added: Terms = ()
    joined: bool = False


def join_sums(scan: gs.Node) -> bool:
    """Write every next state with one decay; returns whether there was one to write."""
    body: gs.Graph = scan.attrs["body"]
    states = body.inputs[: -scan.attrs["num_scan_inputs"]]
    known = Values.of_graph(body)
    found = [_joined(body, states, place, known) for place in range(len(states))]
    if any(found):
        body.cleanup().toposort()
    return any(found)


def _joined(body: gs.Graph, states: Sequence[gs.Tensor], place: int, known: Values) -> bool:
    step = _Step(body, states, place, known)
    after = original_of(body.outputs[place])
    value = step.values.get(after.name)
    if value is None or not value.joined:
        disconnect(step.nodes)
        return False
    made = step.written(value)
    body.nodes += step.nodes
    for node in list(after.outputs):
        node.inputs = [made if t is after else t for t in node.inputs]
    body.outputs = [made if t is after else t for t in body.outputs]
    return True


class _Step:
    """The values of a step that are r S + b of one of its states.

    Attributes:
        values: by name.
        nodes: what was written to say them, which is not in the body yet.
    """

    def __init__(
        self, body: gs.Graph, states: Sequence[gs.Tensor], place: int, known: Values
    ) -> None:
        self.state, self._known = states[place], known
        self.nodes: list[gs.Node] = []
        self.of_states = {t.name for t in states}
        self.values = {self.state.name: _Affine(((1.0, None),))}
        self._numbers: dict[float, gs.Constant] = {}
        self._made: dict[tuple[object, ...], gs.Variable] = {
            (n.op, *map(_key, n.inputs)): n.outputs[0] for n in body.nodes
        }
        for node in body.nodes:
            reads = [t for t in node.inputs if t.name in self.of_states]
            if not reads or node.op in SIZES_ONLY:
                self._is_whole(node)
                continue
            self.of_states |= {o.name for o in node.outputs}
            # One operand that is not r S + b makes the result something else.
            followed = all(t.name in self.values for t in reads)
            value = self._value(node) if followed and self._is_whole(node) else None
            if value is not None:
                self.values[node.outputs[0].name] = value

    def _is_whole(self, node: gs.Node) -> bool:
        """Return whether a node's result has the shape of the state; notes it where none is said.

        torch's functions of several operators say none of those inside.
        """
        for output in node.outputs:
            if output.shape is None and node.op in ELEMENTWISE:
                output.shape = broadcast(
                    None if t.shape is None else list(t.shape) for t in node.inputs
                )
        # Another shape moves, repeats or sums elements: r and b would not be elementwise.
        return len(node.outputs) == 1 and node.outputs[0].shape == self.state.shape

    def _value(self, node: gs.Node) -> _Affine | None:
        given = [self.values.get(t.name) for t in node.inputs]
        if node.op == "Identity":
            return given[0]
        if node.op == "Neg":
            # -(r S + b) = (-r) S + (-b)
            return given[0] and _scaled(given[0], -1.0)
        if node.op in ("Add", "Sub"):
            first, second = self._pair(node)
            found = _sum(first, second, -1.0 if node.op == "Sub" else 1.0)
            # a S + b + c = a S + (b + c): the sum of two terms of tokens can leave the loop. A sum
            # of outer products cannot, as it would be kept for all tokens.
            several = len(found.added) > 1 and not any(self._is_outer(x) for _, x in found.added)
            return replace(found, joined=found.joined or several)
        # A product of two values of the state is of second degree in it.
        if node.op == "Mul" and given.count(None) == 1:
            own, factor = (0, 1) if given[1] is None else (1, 0)
            return self._times(given[own], node.inputs[factor])
        # A condition that reads the state makes the choice nonlinear in it.
        if node.op == "Where" and given[0] is None:
            return self._chosen(node)
        return None

    def _is_outer(self, tensor: gs.Tensor | None) -> bool:
        """Return whether a value is an outer product, or one of those times something."""
        node = None if tensor is None else producer(tensor)
        if node is None or node.op not in PRODUCTS | PASS_ON:
            return False
        if node.op in PASS_ON:
            return self._is_outer(node.inputs[0])
        whole = [t for t in node.inputs if _numbers(t) == _numbers(self.state)]
        return not whole or any(map(self._is_outer, whole))

    def _pair(self, node: gs.Node) -> tuple[_Affine, _Affine]:
        """Return the last two inputs; one of no state is what is added."""
        first, second = node.inputs[-2:]
        return self._of(first), self._of(second)

    def _of(self, tensor: gs.Tensor) -> _Affine:
        return self.values.get(tensor.name, _Affine((), ((1.0, tensor),)))

    def _times(self, value: _Affine | None, factor: gs.Tensor) -> _Affine:
        assert value is not None
        # f (r S + b) = (f r) S + f b; with b = 0 the step has this form already.
        rate, added = (self._product(terms, factor) for terms in (value.rate, value.added))
        return _Affine(rate, added, value.joined or bool(added))

    def _product(self, terms: Terms, factor: gs.Tensor) -> Terms:
        if not terms:
            return ()
        if len(terms) > 1:
            # (x + y) f takes one product, x f + y f two.
            terms = ((1.0, self._tensor(terms)),)
        ((sign, own),) = terms
        return ((sign, factor if own is None else self._add("Mul", own, factor)),)

    def _chosen(self, node: gs.Node) -> _Affine:
        """Return a choice between two values, by a condition of no state."""
        first, second = self._pair(node)
        rate, added = (
            # Where(k, r S + b, q S + c) = Where(k, r, q) S + Where(k, b, c), element by element.
            self._choice(node.inputs[0], *sides)
            for sides in ((first.rate, second.rate), (first.added, second.added))
        )
        return _Affine(rate, added, joined=True)

    def _choice(self, condition: gs.Tensor, first: Terms, second: Terms) -> Terms:
        """Return a Where of two sums; if one of them is zero, a product with a 0/1 mask."""
        first, second = (self._without_zeros(terms) for terms in (first, second))
        if not (first and second):
            # Where(k, x, 0) = Where(k, 1, 0) x for finite x, and a product joins other factors of
            # the state.
            numbers = (self._number(1.0 if first else 0.0), self._number(1.0 if second else 0.0))
            return self._product(first or second, self._add("Where", condition, *numbers))
        sides = [self._tensor(terms) for terms in (first, second)]
        # A choice between equal values is that value.
        same = sides[0] is sides[1]
        return ((1.0, sides[0] if same else self._add("Where", condition, *sides)),)

    def _without_zeros(self, terms: Terms) -> Terms:
        return tuple((c, x) for c, x in terms if x is None or not self._known.is_zero(x))

    def written(self, value: _Affine) -> gs.Tensor:
        """Return r S + b as nodes."""
        found = self._add("Mul", self._tensor(value.rate), self.state)
        if value.added:
            found = self._add("Add", found, self._tensor(value.added))
        found.shape = list(known_shape(self.state))
        return found

    def _tensor(self, terms: Terms) -> gs.Tensor:
        """Return a sum as one tensor."""
        exponent = _exponent(terms)
        if exponent is not None:
            name = f"{self.state.name}/exponent_{len(self._made) + len(self._numbers)}"
            return self._add("Exp", gs.Constant(name, np.asarray(exponent, self.state.dtype)))
        found: gs.Tensor | None = None
        # Positive terms first: the sum then begins without a Neg.
        for sign, tensor in sorted(terms, key=lambda term: -term[0]):
            one = self._number(abs(sign)) if tensor is None else tensor
            if tensor is not None and abs(sign) != 1.0:
                one = self._add("Mul", tensor, self._number(abs(sign)))
            if found is None:
                found = one if sign > 0 else self._add("Neg", one)
            else:
                found = self._add("Add" if sign > 0 else "Sub", found, one)
        return self._number(0.0) if found is None else found

    def _number(self, value: float) -> gs.Tensor:
        if value not in self._numbers:
            name = f"{self.state.name}/number_{len(self._made) + len(self._numbers)}"
            self._numbers[value] = gs.Constant(name, np.asarray(value, self.state.dtype))
        return self._numbers[value]

    def _add(self, op: str, *inputs: gs.Tensor) -> gs.Variable:
        """Return what a node computes; there is one node of every kind with the same inputs."""
        key = (op, *(_key(t) for t in inputs))
        if key not in self._made:
            number = len(self._made) + len(self._numbers)
            made = gs.Variable(f"{self.state.name}/{op}_{number}", self.state.dtype)
            made.shape = broadcast(None if t.shape is None else list(t.shape) for t in inputs)
            self.nodes.append(gs.Node(op, made.name, {}, list(inputs), [made]))
            self._made[key] = made
        return self._made[key]


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


def _numbers(tensor: gs.Tensor) -> int | None:
    return None if tensor.shape is None else numbers_in([tensor])


def _key(tensor: gs.Tensor) -> object:
    """Return a key by which values are compared; equal numbers have one key in every type."""
    while (cast := producer(tensor, "Cast")) is not None and not cast.inputs[0].inputs:
        tensor = cast.inputs[0]
    if isinstance(tensor, gs.Constant) and tensor.values.size == 1:
        return float(tensor.values.item()), tensor.values.shape
    return tensor.name


def _scaled(value: _Affine, factor: float) -> _Affine:
    rate, added = (
        tuple((factor * sign, x) for sign, x in terms) for terms in (value.rate, value.added)
    )
    return _Affine(rate, added, value.joined)


def _sum(first: _Affine, second: _Affine, sign: float) -> _Affine:
    second = _scaled(second, sign)
    # (r S + b) + (q S + c) = (r + q) S + (b + c): the terms of both are put together. The step has
    # another form only where both sides read the state.
    joined = first.joined or second.joined or bool(first.rate and second.rate)
    return _Affine((*first.rate, *second.rate), (*first.added, *second.added), joined)
