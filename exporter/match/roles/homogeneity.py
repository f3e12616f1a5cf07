"""Values that are sums of some tensors, or the largest of such sums: f(c x) = c f(x) for c > 0.

Where two of them are equal on random numbers, they are equal on the same numbers of any size.
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_graphsurgeon as gs

from linexport.graph.edit import producer
from linexport.graph.operators import CHOICES, SIZES_ONLY, SUMS
from linexport.graph.partial_eval import Values
from linexport.match.forms.evaluate import Evaluator
from linexport.match.forms.rules.elementwise import VERY_NEGATIVE
from linexport.match.forms.terms import Function, Leaf

OF_ONE = CHOICES | SUMS | {"Neg", "Pad"}
"""Operators that multiply their outputs by what their first input is multiplied by."""

OF_ALL = frozenset(("Add", "Concat", "Max", "Sub", "Sum"))
"""Operators that do so where all inputs are multiplied by the same."""


class Homogeneous:
    """Tells such values in one graph.

    Args:
        graph: the main graph.
        evaluator: of it.
        exponents: the tensors, each under a function.
    """

    def __init__(self, graph: gs.Graph, evaluator: Evaluator, exponents: Collection[Leaf]) -> None:
        self.graph, self.evaluator = graph, evaluator
        self._exponents = {(f.tensor.name, f.function) for f in exponents}
        self._known: dict[str, bool] = {}
        self._outer: dict[str, gs.Tensor] = {}
        self._bodies: dict[str, tuple[gs.Node, Values]] = {}
        for scan in (n for n in graph.nodes if n.op == "Scan"):
            self._enter(scan)

    def grows(self, tensor: gs.Tensor) -> bool:
        """Return whether a value is one of them, be it in the body of a Scan."""
        if tensor.name not in self._known:
            self._known[tensor.name] = True  # a state is, if what it becomes is
            self._known[tensor.name] = self._compute(tensor)
        return self._known[tensor.name]

    def _enter(self, scan: gs.Node) -> None:
        """Note which tensors the inputs of a body are, and which states go on as what."""
        body: gs.Graph = scan.attrs["body"]
        values = Values.of_graph(body)
        for tensor in (o for node in body.nodes for o in node.outputs):
            self._bodies[tensor.name] = scan, values
        for inner, outer in zip(body.inputs, scan.inputs, strict=True):
            self._outer[inner.name] = outer

    def _compute(self, tensor: gs.Tensor) -> bool:
        if self._is_neutral(tensor) or self._is_exponent(tensor):
            return True
        if tensor.name in self._outer:
            return self.grows(self._outer[tensor.name]) and self._goes_on(tensor)
        node = producer(tensor)
        if node is None or node.domain not in (None, "", "ai.onnx"):
            return False
        if node.op == "Scan":
            place = next(i for i, o in enumerate(node.outputs) if o is tensor)
            return self.grows(node.attrs["body"].outputs[place])
        # f(c x) = c f(x) is kept by moves, sums and the largest of values, for c > 0.
        if node.op in OF_ONE:
            filled = node.inputs[2:3] if node.op == "Pad" else []
            return all(map(self.grows, [node.inputs[0], *(t for t in filled if not t.is_empty())]))
        if node.op == "Where":
            # A choice that data makes may change with their size.
            return self._follows_from_sizes(node.inputs[0]) and all(
                map(self.grows, node.inputs[1:])
            )
        return node.op in OF_ALL and all(map(self.grows, node.inputs))

    def _goes_on(self, tensor: gs.Tensor) -> bool:
        """Return whether a state is still one of them after a step; of a token, true."""
        scans = (n for n in self.graph.nodes if n.op == "Scan")
        for body, count in ((n.attrs["body"], n.attrs["num_scan_inputs"]) for n in scans):
            names = [t.name for t in body.inputs[: len(body.inputs) - count]]
            if tensor.name in names:
                return self.grows(body.outputs[names.index(tensor.name)])
        return True

    def _is_neutral(self, tensor: gs.Tensor) -> bool:
        """Return whether a value is zero, or below all exponents, everywhere."""
        if isinstance(tensor, gs.Constant):
            values = tensor.values
            return bool(((values == 0) | (values <= VERY_NEGATIVE)).all())
        form = None if tensor.name in self._bodies else self.evaluator.form(tensor)
        number = None if form is None else form.scalar
        return number is not None and (number == 0 or number <= VERY_NEGATIVE)

    def _is_exponent(self, tensor: gs.Tensor) -> bool:
        if tensor.name in self._bodies or tensor.name in self._outer:
            return False
        form = self.evaluator.form(tensor)
        if form is None or len(form.terms) != 1:
            return False
        leaves: list[Leaf] = form.terms[0].of(Leaf)
        found: set[tuple[str, Function]] = {(f.tensor.name, f.function) for f in leaves}
        return len(leaves) == len(form.terms[0].factors) > 0 and found <= self._exponents

    def _follows_from_sizes(self, tensor: gs.Tensor) -> bool:
        """Return whether a mask does not depend on data."""
        pending, seen = [tensor], set[str]()
        given = {t.name for t in self.graph.inputs} | self._outer.keys()
        while pending:
            found = pending.pop()
            if found.name in given:
                return False
            node = producer(found)
            if found.name not in seen and node is not None and node.op not in SIZES_ONLY:
                seen.add(found.name)
                pending += node.inputs
        return True
