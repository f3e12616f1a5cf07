"""Operators that act on each entry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.operators import ELEMENTWISE
from linexport.graph.states import BEGUN
from linexport.token_flow.axes import Axis, fixed
from linexport.token_flow.broadcasting import elementwise
from linexport.token_flow.interpreter import Interpreter, rule
from linexport.token_flow.lengths import of
from linexport.token_flow.values import MixingError, Time, TokenValue

OF_MICROSOFT = ("Gelu", "FastGelu", "QuickGelu", "BiasGelu")


@rule(*ELEMENTWISE - {"Clip"}, *(f"com.microsoft:{name}" for name in OF_MICROSOFT))
def entrywise(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow what is computed of entries that meet."""
    inputs = a.inputs(node)
    begun = _begun(a, inputs) if node.op == "Where" else None
    return [begun or elementwise(a, node.op, inputs)]


def _begun(a: Interpreter, inputs: Sequence[TokenValue]) -> TokenValue | None:
    """Return the state of Where(there was a call before, a state, what a sequence begins with).

    Before the first token there are no others: what is taken of the first call then is what the
    whole sequence has there.
    """
    flag, state, first = inputs
    named = len(flag.states) == 1 and next(iter(flag.states)).endswith(BEGUN)
    if not named or len(state.states) != 1 or first.time != Time.ALWAYS or first.faults:
        return None
    a.check_same_everywhere(first)
    for span in first.spans:
        least = (a.past + of(a.multiple) - span.stop).least
        if span.start != a.past or span.real is not None or least is None or least < 0:
            return None
    return state


@rule("Dropout")
def dropout(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow what inference leaves as it is."""
    given = a.value(node.inputs[0])
    return [elementwise(a, "Identity", [given]), replace(given.without_numbers(), tokens=False)]


@rule("Clip")
def clip(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow entries between two ends, of which either may be left out."""
    ends = []
    for place, name, default in ((1, "min", -math.inf), (2, "max", math.inf)):
        end = a.optional(node, place)
        number = np.full((), node.attrs.get(name, default), object)
        ends.append(TokenValue((), numbers=number) if end is None else end)
    return [elementwise(a, "Clip", [a.value(node.inputs[0]), *ends])]


@rule("OneHot")
def one_hot(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow an entry as a vector of zeros with a one."""
    indices, depth = a.value(node.inputs[0]), a.value(node.inputs[1]).uniform
    place = node.attrs.get("axis", -1) % (indices.rank + 1)
    found = elementwise(a, "OneHot", [indices])
    size = fixed(a.axis_size(depth, node.outputs[0], place))
    axes = (*found.known_axes[:place], size, *found.known_axes[place:])
    return [replace(found.without_numbers(), axes=axes)]


@rule("QuantizeLinear", "DequantizeLinear")
def scaled(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Follow entries with a scale for all, or for each place along one axis."""
    given, *scales = a.inputs(node)
    along = [s for s in scales if s.rank == 1 and any(s.known_axes)]
    if any(s.spans for s in scales) or any(s.rank > 1 for s in scales):
        raise MixingError("quantises by scales that cannot be followed")
    if along:
        place = node.attrs.get("axis", 1) % given.rank
        shape: list[Axis] = [() for _ in range(given.rank)]
        shape[place] = along[0].known_axes[0]
        scales = [TokenValue(tuple(shape))]
    return [elementwise(a, node.op, [given, *scales])]


@rule("DynamicQuantizeLinear")
def scaled_together(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Refuse a scale that all tokens of a call decide."""
    if a.value(node.inputs[0]).spans:
        raise MixingError(
            "takes its scale from the least and the largest value of all tokens of a call",
            "quantise with scales that were measured before (static quantisation), or the weights "
            "alone",
        )
    return [replace(a.stated(t, a.value(node.inputs[0]).faults)) for t in node.outputs]


@rule("RandomNormalLike", "RandomUniformLike", "Bernoulli")
def random(a: Interpreter, node: gs.Node) -> Sequence[TokenValue]:
    """Refuse what is another number in every call."""
    raise MixingError("draws random numbers, which are others in every call")
