"""Parts of a step that is linear in its states: their sum is what the step computes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import parser

from linexport.graph.contract import NoMatchError
from linexport.graph.surgeon import to_model
from linexport.loops.step_algebra import StepAlgebra

pytestmark = pytest.mark.usefixtures("one_thread")

OPERATORS = {
    "{0} = Add ({1}, {2})": 2,
    "{0} = Sub ({1}, {2})": 2,
    "{0} = Neg ({1})": 1,
    "{0} = Mul (t, {1})": 1,
    "{0} = Mul ({1}, half)": 1,
    "{0} = Div ({1}, two)": 1,
    "{0} = Where (chosen, {1}, {2})": 2,
    "{0} = MatMul ({1}, w)": 1,
    "{0} = Sum ({1}, {2}, t)": 2,
    "{0}_a, {0}_b = Split <axis = 1, num_outputs = 2> ({1})"
    " {0} = Concat <axis = 1> ({0}_b, {0}_a)": 1,
    "{0}_a, {0}_b = Split <axis = 1, num_outputs = 2> ({1})"
    " {0}_c, {0}_d = Split <axis = 1, num_outputs = 2> ({2})"
    " {0} = Concat <axis = 1> ({0}_b, {0}_c)": 2,
    "{0}_p = Transpose <perm = [1, 0]> ({1}) {0}_q = Reshape ({0}_p, flat)"
    " {0}_r = Reshape ({0}_q, square) {0} = Transpose <perm = [1, 0]> ({0}_r)": 1,
}
"""Lines of a step, and how many values they read: {0} is made of {1} and {2}."""


@st.composite
def steps(draw: st.DrawFn) -> str:
    """Lines that compute next_g and next_h from the states g, h and the token t."""
    names, lines = ["g", "h", "t"], []
    for place in range(draw(st.integers(1, 7))):
        line, count = draw(st.sampled_from(sorted(OPERATORS.items())))
        read = [draw(st.sampled_from(names)) for _ in range(count)]
        lines.append(line.format(f"v{place}", *read))
        names.append(f"v{place}")
    lines += [f"next_{s} = Identity ({draw(st.sampled_from(names))})" for s in ("g", "h")]
    return " ".join(lines)


def model(lines: str) -> onnx.ModelProto:
    """A step by itself, as a graph of its states and its token."""
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
        step (float[1, 4] g, float[1, 4] h, float[1, 4] t)
        => (float[1, 4] next_g, float[1, 4] next_h)
        <float half = {{0.5}}, float[1, 4] two = {{2.0, -1.0, 4.0, 0.5}},
         float[4, 4] w = {{{", ".join(str(0.1 * i - 0.7) for i in range(16))}}},
         int64[1] flat = {{4}}, int64[2] square = {{4, 1}}, float zero = {{0.0}}>
        {{ chosen = Greater (t, zero) {lines} }}"""
    return onnx.shape_inference.infer_shapes(parser.parse_model(text))


def run(of: onnx.ModelProto, **given: np.ndarray) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(of.SerializeToString(), options)
    taken = {i.name for i in session.get_inputs()}
    return session.run(None, {name: x for name, x in given.items() if name in taken})


def parts(lines: str, added: bool) -> onnx.ModelProto:
    """The graph of L e, e in the place of the states; or that of c."""
    graph = gs.import_onnx(model(lines))
    step = StepAlgebra(graph, graph.inputs[:2])
    e = [gs.Variable(f"e_{t.name}", t.dtype, t.shape) for t in graph.inputs[:2]]
    found = step.added() if added else step.linear(e)
    graph.nodes += step.nodes
    graph.inputs = [graph.inputs[2], *e]
    zeros = [gs.Constant(f"zero_{i}", np.zeros((1, 4), np.float32)) for i in range(2)]
    graph.outputs = []
    for place, x in enumerate(found):
        graph.outputs.append(gs.Variable(f"part_{place}", np.float32, (1, 4)))
        both = [zeros[place] if x is None else x, zeros[place]]
        graph.nodes.append(gs.Node("Add", f"part_{place}", {}, both, [graph.outputs[place]]))
    return to_model(graph.cleanup().toposort())


@settings(max_examples=60, deadline=None)
@given(lines=steps(), seed=st.integers(0, 9))
def test_a_step_is_what_it_makes_of_states_and_what_it_adds(lines: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    g, h, t = (random.normal(size=(1, 4)).astype(np.float32) for _ in range(3))
    expected = run(model(lines), g=g, h=h, t=t)
    linear = run(parts(lines, added=False), e_g=g, e_h=h, t=t)
    added = run(parts(lines, added=True), e_g=g, e_h=h, t=t)
    for whole, a, b in zip(expected, linear, added, strict=True):
        np.testing.assert_allclose(a + b, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "lines",
    [
        "next_g = Mul (g, h) next_h = Identity (h)",
        "next_g = Tanh (g) next_h = Identity (h)",
        "c = Greater (g, zero) next_g = Where (c, t, g) next_h = Identity (h)",
        "p = Add (g, t) next_g = Mul (p, p) next_h = Identity (h)",
    ],
)
def test_a_step_that_is_not_linear_is_refused(lines: str) -> None:
    graph = gs.import_onnx(model(lines))
    step = StepAlgebra(graph, graph.inputs[:2])
    with pytest.raises(NoMatchError, match="next_g is not followed"):
        step.linear([None, None])
