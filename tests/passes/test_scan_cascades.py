"""States of one loop that read each other in an order: a loop for each, and the same values."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import parser
from torch import nn

from linexport import passes
from linexport.graph.surgeon import to_model
from linexport.passes.scan_cascades import separate_states
from tests.loops.test_loops import Recurrence
from tests.passes.test_hoist_from_scans import FORM, with_shapes
from tests.support.loops import check_streams, operators, reasons, rewritten

pytestmark = pytest.mark.usefixtures("one_thread")


class State(NamedTuple):
    """s' = rate s + token t + what it reads of states before it, each before or after the step.

    A rate of 0: it is what these were a step ago.
    """

    rate: float
    token: float
    start: float
    read: tuple[tuple[int, bool, float], ...]
    shown: tuple[bool, float]


FACTORS = st.sampled_from((-0.75, 0.5, 1.0))


@st.composite
def systems(draw: st.DrawFn) -> list[State]:
    """States in the order in which they read each other."""
    found, begun = list[State](), draw(st.booleans())
    for place in range(draw(st.integers(2, 4))):
        rate = draw(st.sampled_from((0.0, -0.5, 0.9)))
        of = draw(st.lists(st.sampled_from(range(place)), unique=True)) if place else []
        read = tuple((i, draw(st.booleans()), draw(FACTORS)) for i in of)
        start = draw(FACTORS) if rate and begun else 0.0
        shown = (draw(st.booleans()), draw(st.sampled_from((0.0, 1.0, -2.0))))
        found.append(State(rate, draw(FACTORS), start, read, shown))
    return found


def model_of(system: list[State], order: list[int]) -> onnx.ModelProto:
    """A Scan over x (1, seq, 4) whose states are listed in some order, and a sum of them."""
    lines, sums = list[str](), list[str]()
    numbers = {"half": 0.5}

    def number(value: float) -> str:
        name = f"number_{len(numbers)}"
        numbers[name] = value
        return name

    for i, state in enumerate(system):
        terms = [f"token_{i}"]
        lines.append(f"token_{i} = Mul (t, {number(state.token)})")
        if state.rate:
            lines.append(f"kept_{i} = Mul ({number(state.rate)}, s_{i})")
            terms.append(f"kept_{i}")
        for j, after, factor in state.read:
            of = f"next_{j}" if after else f"s_{j}"
            lines.append(f"read_{i}_{j} = Mul ({of}, {number(factor)})")
            terms.append(f"read_{i}_{j}")
        for n, term in enumerate(terms[1:]):
            last = n == len(terms) - 2
            made = f"next_{i}" if last else f"sum_{i}_{n}"
            before = terms[0] if n == 0 else f"sum_{i}_{n - 1}"
            lines.append(f"{made} = Add ({before}, {term})")
        if len(terms) == 1:
            lines.append(f"next_{i} = Identity ({terms[0]})")
        after, factor = state.shown
        lines.append(f"shown_{i} = Mul ({f'next_{i}' if after else f's_{i}'}, {number(factor)})")
        sums.append(f"shown_{i}")
    lines.append(f"out = Sum ({', '.join(sums)})".replace("Sum", "Add") if len(sums) == 2 else "")
    if len(sums) > 2:
        lines[-1] = f"out_0 = Sub ({sums[0]}, {sums[1]})"
        for n, term in enumerate(sums[2:]):
            made = "out" if n == len(sums) - 3 else f"out_{n + 1}"
            lines.append(f"{made} = Add (out_{n}, {term})")
    starts = [f"float[1, 4] start_{i} = {{{', '.join([str(system[i].start)] * 4)}}}" for i in order]
    stored = [f"float {name} = {{{value}}}" for name, value in numbers.items()]
    states = ", ".join(f"float[1, 4] s_{i}" for i in order)
    after = ", ".join(f"float[1, 4] next_{i}" for i in order)
    last = ", ".join(f"last_{i}" for i in order)
    text = f"""{FORM} g (float[1, seq, 4] x) => (float[seq, 1, 4] y)
        <{", ".join([*starts, *stored])}>
        {{ {last}, y = Scan <num_scan_inputs = 1, scan_input_axes = [1], body = step
            ({states}, float[1, 4] t) => ({after}, float[1, 4] out)
            {{ {" ".join(lines)} }}> ({", ".join(f"start_{i}" for i in order)}, x) }}"""
    return with_shapes(parser.parse_model(text))


def expected_of(system: list[State], x: np.ndarray) -> np.ndarray:
    """The same in plain float64."""
    before, rows = [np.full(4, state.start) for state in system], []
    for token in x.astype(np.float64):
        after = list[np.ndarray]()
        for i, state in enumerate(system):
            value = state.rate * before[i] + state.token * token
            for j, new, factor in state.read:
                value = value + factor * (after if new else before)[j]
            after.append(value)
        shown = [f * (after if new else before)[i] for i, (*_, (new, f)) in enumerate(system)]
        signs = [1, -1 if len(system) > 2 else 1, *[1] * (len(system) - 2)]
        rows.append(sum(sign * value for sign, value in zip(signs, shown, strict=True)))
        before = after
    return np.array(rows)


def separated(model: onnx.ModelProto) -> gs.Graph:
    searched = passes.rewrite(model, stop_after="sink_from_scans").model
    graph = gs.import_onnx(searched)
    separate_states(graph)
    assert not separate_states(graph)
    return graph


@settings(max_examples=40, deadline=None)
@given(system=systems(), data=st.data())
def test_states_of_any_order_are_the_same_in_loops_of_their_own(
    system: list[State], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(system))))
    graph = separated(model_of(system, order))
    if any(state.rate for state in system):
        for scan in (node for node in graph.nodes if node.op == "Scan"):
            assert_no_state_reads_another(scan)
    session = onnxruntime.InferenceSession(to_model(graph).SerializeToString())
    for length in (1, 2, 9):
        x = np.random.default_rng(length).normal(size=(1, length, 4)).astype(np.float32)
        (got,) = session.run(None, {"x": x})
        np.testing.assert_allclose(got[:, 0], expected_of(system, x[0]), rtol=1e-4, atol=1e-4)


def assert_no_state_reads_another(scan: gs.Node) -> None:
    """Follow every value of the body to the states that it is computed of."""
    body = scan.attrs["body"]
    count = len(scan.inputs) - scan.attrs["num_scan_inputs"]
    of = {t.name: {i} for i, t in enumerate(body.inputs[:count])}
    for node in body.nodes:
        read = set().union(*(of.get(t.name, set()) for t in node.inputs))
        of |= {o.name: read for o in node.outputs}
    for place, tensor in enumerate(body.outputs):
        read = of.get(tensor.name, set())
        assert read <= {place} if place < count else len(read) <= 1


class ThreeAverages(Recurrence):
    """An average of an average of an average (the triple exponential moving average)."""

    def forward(self, x):
        f = g = h = torch.zeros_like(x[:, 0])
        out = []
        for t in range(x.shape[1]):
            f = f + 0.3 * (x[:, t] - f)
            g = g + 0.3 * (f - g)
            h = h + 0.3 * (g - h)
            out.append(torch.tanh(3 * f - 3 * g + h))
        return torch.stack(out, 1)


class Differences(Recurrence):
    """A high-pass filter: the difference of two tokens is added, whose first one is a state."""

    def forward(self, x):
        before = h = torch.zeros_like(x[:, 0])
        out = []
        for t in range(x.shape[1]):
            h = torch.sigmoid(x[:, t]) * h + x[:, t] - before
            before = x[:, t]
            out.append(h)
        return torch.stack(out, 1)


class Begun(Recurrence):
    """An average of a stored state and of what an average, which is stored too, was before."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.linspace(-2, 2, 8))

    def forward(self, x):
        f, g = self.first.expand(x.shape[0], 8), -self.first.expand(x.shape[0], 8)
        out = []
        for t in range(x.shape[1]):
            g = 0.5 * g + f
            f = torch.sigmoid(x[:, t]) * f + x[:, t]
            out.append(g)
        return torch.stack(out, 1)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (ThreeAverages, {"LinearAttention": 3}),
        (Differences, {"LinearAttention": 1, "CausalConvWithState": 1}),
        (Begun, {"LinearAttention": 2, "CausalConvWithState": 2}),
    ],
)
def test_cascades_and_sums_are_fused_and_stream(
    kind: type[nn.Module], expected: dict[str, int]
) -> None:
    module = kind()
    found = rewritten(module)
    names = operators(found)
    assert {name: names.count(name) for name in names} == expected
    check_streams(found, module)


class Coupled(Recurrence):
    """Two states that read each other (Holt's level and trend)."""

    def forward(self, x):
        level = trend = torch.zeros_like(x[:, 0])
        out = []
        for t in range(x.shape[1]):
            now = 0.3 * x[:, t] + 0.7 * (level + trend)
            trend = 0.2 * (now - level) + 0.8 * trend
            level = now
            out.append(level + trend)
        return torch.stack(out, 1)


def test_states_that_read_each_other_stay_a_loop_that_says_so() -> None:
    found = rewritten(Coupled())
    assert operators(found) == ["Scan"]
    (reason,) = reasons(found)
    assert "two of them read each other" in reason
