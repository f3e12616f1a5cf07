"""Find the first state that differs from the original's or from its op's standard form.

    the original returns it      compared as it is
    an op of the artifact does   the op's standard operators, on the original's inputs of the node

A state that is right after a whole sequence can be wrong in pieces: then tokens are fed one by one,
and the first after which a state is not that of the same tokens fed at once is found by bisection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from linexport.debugging.cut import cut
from linexport.debugging.differences import StateFinding
from linexport.errors import OpError
from linexport.graph.states import State
from linexport.parity.compare import compare_arrays
from linexport.parity.diverge import BothValues
from linexport.parity.tolerances import Tolerance
from linexport.plugins.ops.op import DOMAIN
from linexport.plugins.ops.registry import all_ops, attach_functions
from linexport.targets.base import InferenceSession, OrtSession

STEPS = 64
"""Most tokens that are fed one by one."""

Arrays = Mapping[str, np.ndarray]


def first_state(
    both: BothValues, states: Sequence[State], model: onnx.ModelProto
) -> StateFinding | None:
    """Return the first state, in the artifact's order, that differs after a whole sequence."""
    got = both.got([])
    for state in states:
        if state.growing_axis is not None or state.present not in got:
            continue
        node, output = _writer(both, state.present)
        reference, value = "the original's", both.original.get([state.present]).get(state.present)
        if value is None:
            reference = "that of standard operators, given the original's inputs"
            value = _defined(both, node, output, model)
        if value is None or value.shape != got[state.present].shape:
            continue
        result = compare_arrays(value, got[state.present], both.tolerance)
        if not result.passed:
            return StateFinding(state.present, node.name, result.max_relative_error, reference)
    return None


def _writer(both: BothValues, present: str) -> tuple[onnx.NodeProto, str]:
    """Return the op that computes a state, and its output; a Cast, say, may lie behind it."""
    name = present
    node = both.ancestry.producer[name]
    while node.domain != DOMAIN and node.input[0] in both.ancestry.producer:
        name = node.input[0]
        node = both.ancestry.producer[name]
    return node, name


def _defined(
    both: BothValues, node: onnx.NodeProto, output: str, model: onnx.ModelProto
) -> np.ndarray | None:
    """Return what the op's standard operators give for the original's inputs of a node."""
    if node.domain != DOMAIN or node.op_type not in all_ops():
        return None
    inputs = _inputs(both, [name for name in node.input if name], model)
    part = cut(model, [output], inputs)
    try:
        attach_functions(part)
    except OpError:  # an op that is not of this version
        return None
    session = OrtSession(part.SerializeToString())
    return session.run({i.name: inputs[i.name] for i in part.graph.input})[output]


def _inputs(both: BothValues, names: Sequence[str], model: onnx.ModelProto) -> Arrays:
    """Return the original's values of a node's inputs, by what lies between where need be."""
    stored = (t for t in model.graph.initializer if t.name in names)
    held = {t.name: onnx.numpy_helper.to_array(t) for t in stored}
    direct = {**both.fed, **held, **both.original.get([n for n in names if n in both.comparable])}
    missing = [name for name in names if name not in direct]
    if missing:
        known = {**both.fed, **both.original.get(both.ancestry.nearest(missing, both.comparable))}
        part = cut(model, missing, known)
        direct |= OrtSession(part.SerializeToString()).run(
            {i.name: known[i.name] for i in part.graph.input}
        )
    return direct


def first_split(
    session: InferenceSession,
    states: Sequence[State],
    fed: Arrays,
    axes: Mapping[str, int],
    tolerance: Tolerance,
) -> StateFinding | None:
    """Return the first state, and the token, from which single tokens differ from a sequence.

    Args:
        session: of the artifact.
        states: compared, those that grow aside.
        fed: inputs of a whole sequence, states among them.
        axes: the token axis of the inputs that have one.
        tolerance: of a state.
    """
    if not axes:
        return None
    length = min(STEPS, *(fed[name].shape[axis] for name, axis in axes.items()))

    def part(start: int, stop: int) -> dict[str, np.ndarray]:
        return {
            name: x.take(range(start, stop), axes[name]) if name in axes else x
            for name, x in fed.items()
        }

    after: list[Arrays] = []
    state = {s.past: fed[s.past] for s in states}
    for token in range(length):
        outputs = session.run({**part(token, token + 1), **state})
        state = {s.past: outputs[s.present] for s in states}
        after.append(state)

    def wrong(token: int) -> StateFinding | None:
        whole = session.run(part(0, token + 1))
        for held in states:
            if held.growing_axis is not None:
                continue
            result = compare_arrays(whole[held.present], after[token][held.past], tolerance)
            if not result.passed:
                return StateFinding(
                    held.present,
                    held.op,
                    result.max_relative_error,
                    "that of the same tokens fed at once",
                    token,
                )
        return None

    found = wrong(length - 1)
    low, high = 0, length - 1
    while found is not None and low < high:
        middle = (low + high) // 2
        earlier = wrong(middle)
        if earlier is None:
            low = middle + 1
        else:
            found, high = earlier, middle
    return found
