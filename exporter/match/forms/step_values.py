"""Names for values of a loop's steps that no rule follows, such as running maxima.

    m_t = max(f_t + m_{t-1}, i_t)        C_t = exp(f_t + m_{t-1} - m_t) C_{t-1} + exp(i_t - m_t) U_t

Neither m_t nor m_{t-1} is a sum of products. Named, they are factors of other values all the same,
and cancel where they keep exponents small: the product of the exp(m_{u-1} - m_u) of several steps
has the first and the last name alone. Loops that compute the same state have one name for it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import onnx_graphsurgeon as gs

from linexport.graph.edit import nodes_behind, original_of, producer
from linexport.graph.scan_body import StepStates
from linexport.match.forms.terms import IDENTITY, StepValue, Term


class StepNames:
    """Names in all loops of a graph."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._pairs: dict[tuple[int, int], tuple[gs.Tensor, gs.Tensor]] = {}
        self._following: dict[str, str] = {}
        self._begun: dict[str, tuple[gs.Tensor, gs.Tensor]] = {}

    def of_states(self, scan: gs.Node) -> dict[str, gs.Tensor]:
        """Return the names of the states that are not linear in themselves.

        By the names in the body of their values before and after a step.
        """
        body: gs.Graph = scan.attrs["body"]
        count = len(body.inputs) - scan.attrs["num_scan_inputs"]
        found: dict[str, gs.Tensor] = {}
        for place in range(count):
            before, after = body.inputs[place], original_of(body.outputs[place])
            if StepStates(body, [before]).first_nonlinear(nodes_behind([after])) is None:
                continue
            start = self._number(("start", scan.inputs[place].name))
            step = self._value(after, self._given(scan, place), {})
            pair = self._pairs.setdefault((start, step), (before, after))
            found |= {before.name: pair[0], after.name: pair[1]}
            self._following[pair[0].name] = pair[1].name
            self._begun.setdefault(pair[1].name, (pair[0], scan.inputs[place]))
        return found

    def before(self, after: str) -> tuple[gs.Tensor, gs.Tensor] | None:
        """Return a named state before a step, and what it begins with, by its name after it."""
        return self._begun.get(after)

    def telescoped(self, exponents: list[Term]) -> tuple[list[Term], list[tuple[Term, Term]]]:
        """Take out pairs of a state before a step and, negative, after it.

        Their sum over steps is a difference of two values of the state. Returns what is left, and
        the pairs.
        """
        for first in exponents:
            for second in exponents:
                if self._follows(first, second):
                    left = [t for t in exponents if t is not first and t is not second]
                    left, pairs = self.telescoped(left)
                    return left, [(first, second), *pairs]
        return exponents, []

    def _follows(self, first: Term, second: Term) -> bool:
        before, after = (t.factors[0] if len(t.factors) == 1 else None for t in (first, second))
        return (
            isinstance(before, StepValue)
            and isinstance(after, StepValue)
            and (first.coefficient, second.coefficient) == (1.0, -1.0)
            and before.function == after.function == IDENTITY
            and before.dims == after.dims
            and self._following.get(before.tensor.name) == after.tensor.name
        )

    def _given(self, scan: gs.Node, place: int) -> dict[str, int]:
        """Return numbers of a body's inputs; one is the state whose step is numbered."""
        body: gs.Graph = scan.attrs["body"]
        count = len(body.inputs) - scan.attrs["num_scan_inputs"]
        found = {t.name: self._number(("state", t.name)) for t in body.inputs[:count]}
        found[body.inputs[place].name] = self._number(("itself",))
        axes = scan.attrs.get("scan_input_axes") or [0] * (len(body.inputs) - count)
        for inner, tensor, axis in zip(body.inputs[count:], scan.inputs[count:], axes, strict=True):
            found[inner.name] = self._number(("token", tensor.name, axis))
        return found

    def _value(self, tensor: gs.Tensor, given: Mapping[str, int], known: dict[str, int]) -> int:
        """Return a number that is the same for values that are computed alike of the same."""
        if tensor.name in given:
            return given[tensor.name]
        if tensor.name not in known:
            known[tensor.name] = self._number(self._key(tensor, given, known))
        return known[tensor.name]

    def _key(self, tensor: gs.Tensor, given: Mapping[str, int], known: dict[str, int]) -> Hashable:
        node = producer(tensor)
        if isinstance(tensor, gs.Constant):
            values = tensor.values
            return ("number", str(values.dtype), values.shape, values.tobytes())
        if node is None or any(isinstance(a, gs.Graph) for a in node.attrs.values()):
            return ("tensor", tensor.name)
        attributes = tuple(sorted((name, str(value)) for name, value in node.attrs.items()))
        place = next(i for i, o in enumerate(node.outputs) if o is tensor)
        read = (self._value(t, given, known) for t in node.inputs)
        return (node.op, node.domain, attributes, place, *read)

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))
