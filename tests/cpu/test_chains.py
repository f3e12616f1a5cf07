"""Chains of the CPU library's nodes against float64, and against the nodes they are made of."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from linexport.targets.base import OrtSession
from linexport.targets.cpu_fusion import DOMAIN, with_programs
from linexport.targets.cpu_fusion.chains import OP, with_chains
from tests.support.comparison import assert_close
from tests.support.mixers import STATES, feeds, mixer, reference
from tests.support.native import check_in_place, one_node, session

RTOL = 5e-6
CONVOLUTION = "CausalConvTokens"
NAMED = (OP, "Tokenwise", CONVOLUTION, "CausalConvWithState", "LinearAttention")
"""Operators that an error may be of."""


def chained(opaque: bool = False) -> onnx.ModelProto:
    return with_chains(with_programs(mixer(opaque)))


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def scales(want: list[np.ndarray]) -> list[np.ndarray]:
    return [np.abs(y).max(initial=1) + np.abs(y) for y in want]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 9, 70, 700])
@pytest.mark.parametrize("threads", [1, 3])
def test_equals_float64_and_its_nodes_bit_by_bit(batch: int, length: int, threads: int) -> None:
    x, programs = feeds(batch, length), with_programs(mixer())
    assert operators(chained()) == [OP]
    got = session(chained(), threads).run(None, x)
    want = reference(x)
    assert_close(got, want, scales(want), RTOL)
    for a, b in zip(got, session(programs, threads).run(None, x), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_values_too_long_to_keep() -> None:
    x = feeds(1, 160_000)
    alone = session(with_programs(mixer()), 2).run(None, x)
    for a, b in zip(session(chained(), 2).run(None, x), alone, strict=True):
        np.testing.assert_array_equal(a, b)


def test_without_the_library_the_same_nodes_run() -> None:
    x, model = feeds(2, 9), chained().SerializeToString()
    want = reference(x)
    assert_close([*OrtSession(model, 1).run(x).values()], want, scales(want), RTOL)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_states_in_place(length: int) -> None:
    model, x = chained(), feeds(2, length)
    check_in_place(model, x, threads=2)


def test_single_steps_are_the_whole() -> None:
    """Also where another call with longer values comes between them."""
    opened, x = session(chained()), feeds(1, 600)
    want = opened.run(None, x)
    states, outputs = {name: x[name] for name in STATES}, []
    for t in range(40):
        token = {name: x[name][:, t : t + 1] for name in "xaz"}
        y, *states_after = opened.run(None, {**token, **states})
        states, outputs = dict(zip(STATES, states_after, strict=True)), [*outputs, y]
        if t % 20 == 10:
            opened.run(None, x)
    first = [np.float64(want[0][:, :40])]
    assert_close([np.concatenate(outputs, 1)], first, scales(first), RTOL)


def test_nodes_without_programs_are_a_chain_that_other_software_opens() -> None:
    shapes = {"input": ("B", 3, "T"), "weight": (3, 1, 4)}
    made = one_node("CausalConvWithState", shapes, ("output",))
    first, last = made.graph.node
    second = onnx.NodeProto()
    second.CopyFrom(first)
    second.input[0], second.output[0] = first.output[0], "twice"
    last.input[0] = "twice"
    made.graph.node.insert(1, second)
    model = with_chains(with_programs(made))
    assert operators(model) == [OP, "Cast"]
    assert {n.domain for n in model.graph.node} <= {o.domain for o in model.opset_import}
    rng = np.random.default_rng(0)
    x = {"input": rng.normal(size=(2, 3, 9)), "weight": rng.normal(size=(3, 1, 4))}
    x = {name: value.astype(np.float32) for name, value in x.items()}
    got, want = (OrtSession(m.SerializeToString(), 1).run(x)["output"] for m in (model, made))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(session(model).run(None, x)[0], session(made).run(None, x)[0])


def test_a_node_of_others_divides_a_chain() -> None:
    """What leads out to it and back is no chain: the first program makes what it reads."""
    model = chained(opaque=True)
    assert operators(model).count(OP) == 1 and "Elu" in operators(model)
    x = feeds(1, 5)
    want = session(with_programs(mixer(opaque=True))).run(None, x)
    for a, b in zip(session(model).run(None, x), want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_other_types_are_no_chain() -> None:
    """What a node reads may be of 16 bits, and what the file says nothing of may be anything."""
    model = with_programs(mixer())
    for kind in (TensorProto.FLOAT16, TensorProto.UNDEFINED):
        model.graph.input[3].type.tensor_type.elem_type = kind
        assert CONVOLUTION in {
            node.op_type for node in with_chains(model).graph.node if node.op_type != OP
        }


def test_one_function_serves_chains_that_are_alike() -> None:
    model = chained()
    [node] = model.graph.node
    assert node.domain == DOMAIN
    assert [f.name for f in model.functions if f.overload == node.overload] == [OP]


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(
    at=st.floats(0, 1, exclude_max=True),
    word=st.sampled_from(["-1", "0", "1", "7", "63", "64", "999", "Tokenwise", "Chain", ""]),
)
def test_damaged_steps_are_refused_or_stay_in_their_places(at: float, word: str) -> None:
    model = chained()
    [steps] = [a for a in model.graph.node[0].attribute if a.name == "steps"]
    words = steps.s.decode().split()
    words[int(at * len(words))] = word
    steps.s = " ".join(words).encode()
    try:
        session(model).run(None, feeds(1, 1))
    except Exception as error:  # ONNX Runtime has no class for its own
        assert any(f"{op}: " in str(error) for op in NAMED) or "output" in str(error), error
