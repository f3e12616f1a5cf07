"""Every tensor of a graph in normal form, node after node.

An operator with a rule (``rules/``) has its outputs written in terms of its inputs' forms. Any
other output, and any form that no match can use, is *opaque*: a leaf of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.monomials import ONE, Size, parse
from linexport.graph.operators import ELEMENTWISE
from linexport.graph.partial_eval import Values
from linexport.match.forms import algebra
from linexport.match.forms.axes import Axis, Index, fresh, size_of
from linexport.match.forms.initializers import of_value
from linexport.match.forms.step_values import StepNames
from linexport.match.forms.terms import Form, Leaf, StepValue, Term
from linexport.match.forms.unify import without_inverses

Rule = Callable[["Evaluator", gs.Node], "Form | dict[str, Form] | None"]
"""Gives the form of the first output, or of several by name."""

RULES: dict[str, Rule] = {}


LIKE_FIRST = {"Softmax", "LogSoftmax", "LayerNormalization", "Trilu"}
"""Operators along an axis whose outputs have the shape of their first input."""

SPLIT = {"Add", "Sub", "Mul", "Div", "Neg", "Exp", "Log", "CumSum"}
"""Operators followed where the first position of a dim has a form of its own."""


def rule(*operators: str) -> Callable[[Rule], Rule]:
    """Register the rule of standard operators."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(operators, function))
        return function

    return register


@dataclass(frozen=True)
class Along:
    """A tensor that another one was made of by a change along one dim."""

    place: int
    form: Form


@dataclass(frozen=True)
class Late(Along):
    """A tensor that has a number of positions more in front, or fewer behind, than another one."""

    by: int


@dataclass(frozen=True)
class Pieces:
    """A tensor that is several others side by side along one dim."""

    place: int
    parts: tuple[tuple[int, Form], ...]
    """The size of each along that dim, and its form with all dims."""


@dataclass(frozen=True)
class Behind:
    """A tensor as its first position along a dim, with size 1 there, and those behind it."""

    place: int
    first: Form
    rest: Form


class Evaluator:
    """The forms of a graph's tensors.

    Args:
        graph: a graph, or the body of a loop.
        bound: forms of a body's inputs.
        outer: of the graph a body is in.
        ends: names of values that others see as tensors of the graph, whatever they are made of.
        initial: names of given states before the first token, which are read as zeros: see
            ``search.initial_states``.
        names: of values of loops that no rule follows, where such values are named.
        step: of the body of a loop whose values are named, the parameter that counts steps.
        named: those of such a body that have a name elsewhere.

    Attributes:
        opaque_over: for an opaque value, the node that made it of a form which was worth following.
        pieces: of values made by Pad and Concat.
        padded: what values are of that have zeros behind it along a dim, however many.
        delayed: what values are of that have one zero in front of it.
        late: what values are of that have several zeros in front of it.
        shortened: what values are of that lack its last positions.
        behind: of values whose first position was put in front of the others.
        products: opaque values as products of two tensors.
        values: known values.
        inside: the forms of the ends.
    """

    def __init__(
        self,
        graph: gs.Graph,
        bound: Mapping[str, Form] | None = None,
        outer: Evaluator | None = None,
        ends: Collection[str] = (),
        initial: Collection[str] = (),
        names: StepNames | None = None,
        step: Axis | None = None,
        named: Mapping[str, gs.Tensor] | None = None,
    ) -> None:
        self.graph, self.outer = graph, outer
        self.ends, self.initial, self.names = ends, initial, names
        self._step, self._named = step, named or {}
        self.inside: dict[str, Form] = {}
        self.values = Values(self.sizes, initial)
        self.opaque_over: dict[str, gs.Node] = {}
        self.pieces: dict[str, Pieces] = {}
        self.padded: dict[str, Along] = {}
        self.delayed: dict[str, Along] = {}
        self.late: dict[str, Late] = {}
        self.shortened: dict[str, Late] = {}
        self.behind: dict[str, Behind] = {}
        self.products: dict[str, Form] = {}
        self._forms: dict[str, Form | None] = dict(bound or {})
        self._weights: set[str] = set()
        for node in graph.nodes:
            self._visit(node)

    def form(self, tensor: gs.Tensor) -> Form | None:
        """The form of a tensor, with labels of its own; None where its rank is unknown."""
        if tensor.name not in self._forms:
            if self.outer is not None:
                return self.outer.form(tensor)
            self._forms[tensor.name] = self._source(tensor)
        found = self._forms[tensor.name]
        # Labels that are summed over must differ between two uses of a tensor in one product.
        return None if found is None else found.fresh()

    def forms(self, tensors: Iterable[gs.Tensor]) -> list[Form] | None:
        """Return the forms of several tensors, or None if one is unknown."""
        found = [self.form(t) for t in tensors]
        return None if any(f is None for f in found) else [f for f in found if f is not None]

    def form_of_input(self, node: gs.Node) -> Form | None:
        """Return what a node makes of its first input, whatever that is made of."""
        given = self._source(node.inputs[0])
        return None if given is None else self.made_of(node, {node.inputs[0].name: given})

    def made_of(self, node: gs.Node, forms: Mapping[str, Form]) -> Form | None:
        """Return what an operator makes of other forms of its inputs."""
        kept = dict(self._forms)
        self._forms.update(forms)
        try:
            found = RULES[node.op](self, node)
        finally:
            self._forms = kept
        return found if isinstance(found, Form) and algebra.reasonable(found) else None

    def sizes(self, tensor: gs.Tensor) -> list[Size] | None:
        """The sizes of a tensor's dims."""
        form = self.form(tensor)
        return None if form is None else [size_of(i) for i in form.dims]

    def ints(self, node: gs.Node, position: int, attribute: str) -> list[int] | None:
        """Integers given as an input, or, in older operator sets, as an attribute."""
        if attribute in node.attrs:
            given = node.attrs[attribute]
            return [int(n) for n in np.atleast_1d(np.asarray(given))]
        if len(node.inputs) <= position or node.inputs[position].is_empty():
            return None
        value = self.values.numbers(node.inputs[position])
        return None if value is None else [int(n) for n in np.atleast_1d(value)]

    def is_weight(self, tensor: gs.Tensor) -> bool:
        """Return whether a tensor is stored in the model, or made of stored ones alone."""
        if isinstance(tensor, gs.Constant) or tensor.name in self._weights:
            return True
        return self.outer is not None and self.outer.is_weight(tensor)

    def is_constant(self, tensor: gs.Tensor) -> bool:
        """Return whether the value does not depend on the inputs."""
        return self.values.numbers(tensor) is not None

    def _visit(self, node: gs.Node) -> None:
        if not node.outputs:
            return
        self.values.visit(node)
        nested = any(isinstance(a, gs.Graph) for a in node.attrs.values())
        if not nested and all(self.is_weight(t) for t in node.inputs if not t.is_empty()):
            self._weights |= {o.name for o in node.outputs}
        found = None
        if self.is_constant(node.outputs[0]):
            self._forms[node.outputs[0].name] = self._source(node.outputs[0])
            return
        if node.domain in (None, "", "ai.onnx") and node.op in RULES:
            found = RULES[node.op](self, node)
            self._split(node)
        forms = found if isinstance(found, dict) else {node.outputs[0].name: found}
        for output in node.outputs:
            form = forms.get(output.name)
            if form is not None and self.names is not None:
                terms = tuple(without_inverses(t) for t in form.terms)
                form = replace(form, terms=terms)
            if output.name in self.initial:
                self._forms[output.name] = self._source(output)
                continue
            reasonable = form is not None and algebra.reasonable(form)
            if form is not None and reasonable and output.name not in self.ends:
                self._forms[output.name] = form
            else:
                if form is not None and reasonable:
                    self.inside[output.name] = form
                self._opaque(node, output)

    def _split(self, node: gs.Node) -> None:
        """Split a result into its first position and the rest, where the inputs are split so."""
        split = [self.behind[t.name] for t in node.inputs if t.name in self.behind]
        places = {b.place for b in split}
        if node.op not in SPLIT or len(places) != 1 or not self._are_split(node, split[0]):
            return
        first, rest = (self._of_half(node, half) for half in ("first", "rest"))
        if first is None or rest is None:
            return
        (place,) = places
        along = self.ints(node, 1, "axis") if node.op == "CumSum" else None
        if along is not None and along[0] % len(rest.dims) == place:
            # x_0, x_0 + x_1, ...: the sum of those behind has the first added.
            first = split[0].first
            summed = algebra.plus(rest, first)
            if summed is None or any(node.attrs.get(n, 0) for n in ("exclusive", "reverse")):
                return
            rest = summed
        self.behind[node.outputs[0].name] = Behind(place, first, rest)

    def _are_split(self, node: gs.Node, found: Behind) -> bool:
        """Return whether all inputs are split at the first position, or the same everywhere."""
        from_end = found.place - len(found.rest.dims)
        for tensor in node.inputs:
            sizes = self.sizes(tensor)
            # With size 1 along the dim both halves are the same.
            if tensor.name not in self.behind and (
                sizes is None or (len(sizes) >= -from_end and sizes[from_end] != ONE)
            ):
                return False
        return True

    def _of_half(self, node: gs.Node, half: str) -> Form | None:
        """Return what an operator makes of the first position of its inputs, or of the others."""
        halves = {t.name: self.behind[t.name] for t in node.inputs if t.name in self.behind}
        return self.made_of(node, {name: getattr(b, half) for name, b in halves.items()})

    def _opaque(self, node: gs.Node, output: gs.Tensor) -> None:
        for tensor in node.inputs:
            form = self._forms.get(tensor.name)
            if form is not None and (tensor.name in self.opaque_over or interesting(form)):
                self.opaque_over[output.name] = node
        self._forms[output.name] = self._at_step(self._source(output) or self._shaped(node, output))

    def _at_step(self, form: Form | None) -> Form | None:
        """Return the form of an opaque value, which in the body of a loop differs step by step."""
        if self._step is None or form is None or form.leaf is None:
            return form
        leaf = form.leaf
        tensor = self._named.get(leaf.tensor.name, leaf.tensor)
        named = StepValue(tensor, (*leaf.dims, (self._step,)), leaf.function)
        return replace(form, terms=(Term(form.terms[0].coefficient, (named,)),))

    def _shaped(self, node: gs.Node, output: gs.Tensor) -> Form | None:
        """Return a leaf whose sizes follow from the inputs' where the graph does not state them."""
        forms = self.forms([t for t in node.inputs if not t.is_empty()])
        if not forms or output is not node.outputs[0]:
            return None
        if node.op in LIKE_FIRST:
            shape = [size_of(i) for i in forms[0].dims]
            return algebra.leaf_form(output, shape)
        if node.op not in ELEMENTWISE:
            return None
        dims: tuple[Index, ...] = ()
        for form in forms:
            aligned = algebra.broadcast(algebra.constant(1.0, dims), form)
            if aligned is None:
                return None
            dims = aligned[2]
        return algebra.leaf_form(output, [size_of(i) for i in dims])

    def _source(self, tensor: gs.Tensor) -> Form | None:
        value = self.values.numbers(tensor)
        if value is not None:
            return of_value(tensor, value)
        if tensor.shape is None:
            return None
        shape = [
            parse(d) if isinstance(d, int) or (isinstance(d, str) and d) else _unknown(tensor, i)
            for i, d in enumerate(tensor.shape)
        ]
        if tensor.name in self.initial:
            return algebra.constant(0.0, tuple(map(fresh, shape)))
        counted = self.values.get(tensor)
        if counted is not None and counted.ndim == 0:
            return algebra.counted(counted.item())
        return algebra.leaf_form(tensor, shape)


def interesting(form: Form) -> bool:
    """Return whether a form is more than one entry of one tensor: a product, a sum, a mask."""
    return len(form.terms) > 1 or any(_compound(t, form) for t in form.terms)


def _compound(term: Term, form: Form) -> bool:
    leaves = term.of(Leaf)
    if len(leaves) != len(term.factors) or len(leaves) > 1 or not term.axes <= form.axes:
        return True
    return any(a.parameter for a in term.axes) or any(isinstance(f, StepValue) for f in leaves)


def _unknown(tensor: gs.Tensor, place: int) -> Size:
    return Size(1, (f"{tensor.name}[{place}]",))
