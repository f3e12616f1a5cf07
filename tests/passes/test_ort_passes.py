"""Passes of target ort: the same values as a float64 oracle, by ONNX Runtime's own operators."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from linexport import passes
from linexport.graph.contract import TARGET
from linexport.passes import target_passes

pytestmark = pytest.mark.usefixtures("one_thread")


def rotary_model(
    heads: int, width: int, rotated: int, layers: int = 1, late: bool = False, **changed: Any
) -> onnx.ModelProto:
    """x (B, heads, T, width) of each layer to y, its first ``rotated`` channels rotated.

    ``late``: cos and sin are computed of angles that are there twice.
    """
    numbers = {"zero": [0], "half": [rotated // 2], "rotated": [rotated], "width": [width]}
    numbers |= {"axis": [3], "one": [1], **changed}
    nodes = [
        *doubled(late),
        node("Unsqueeze", "cos2,one", "cos4"),
        node("Unsqueeze", "sin2,one", "sin4"),
    ]
    for layer in range(layers):
        x = f"x{layer}"
        if rotated < width:
            nodes.append(node("Slice", f"{x},zero,rotated,axis", f"{x}/r"))
            nodes.append(node("Slice", f"{x},rotated,width,axis", f"{x}/rest"))
        source = f"{x}/r" if rotated < width else x
        nodes += [
            node("Slice", f"{source},zero,half,axis", f"{x}/1"),
            node("Slice", f"{source},half,rotated,axis", f"{x}/2"),
            node("Neg", f"{x}/2", f"{x}/neg"),
            node("Concat", f"{x}/neg,{x}/1", f"{x}/turned", axis=-1),
            node("Mul", f"{source},cos4", f"{x}/c"),
            node("Mul", f"{x}/turned,sin4", f"{x}/s"),
            node("Add", f"{x}/c,{x}/s", f"{x}/y" if rotated < width else f"y{layer}"),
        ]
        if rotated < width:
            nodes.append(node("Concat", f"{x}/y,{x}/rest", f"y{layer}", axis=-1))
    angles = ["batch", "seq", rotated // 2]
    shapes = {"angle": angles} if late else {"cos": angles, "sin": angles}
    shapes |= {f"x{n}": ["batch", heads, "seq", width] for n in range(layers)}
    graph = helper.make_graph(
        nodes,
        "rotary",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()],
        [helper.make_tensor_value_info(f"y{n}", TensorProto.FLOAT, None) for n in range(layers)],
        [numpy_helper.from_array(np.asarray(v, np.int64), k) for k, v in numbers.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model)


def doubled(late: bool) -> list[onnx.NodeProto]:
    """Cos and sin of all channels."""
    if late:
        angles = node("Concat", "angle,angle", "angle2", axis=-1)
        return [angles, node("Cos", "angle2", "cos2"), node("Sin", "angle2", "sin2")]
    return [node("Concat", f"{name},{name}", f"{name}2", axis=-1) for name in ("cos", "sin")]


def node(op: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(","), [output], output, **attributes)


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Turn each pair (x_i, x_{i + r/2}) by its angle, in float64; other channels stay."""
    y = x.astype(np.float64)
    half = cos.shape[-1]
    for batch, head, token, i in np.ndindex(*x.shape[:3], half):
        a, b = y[batch, head, token, [i, i + half]]
        c, s = float(cos[batch, token, i]), float(sin[batch, token, i])
        y[batch, head, token, i], y[batch, head, token, i + half] = a * c - b * s, b * c + a * s
    return y


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, feeds)


def kinds(model: onnx.ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node]


@settings(max_examples=12, deadline=None)
@given(
    heads=st.integers(1, 3),
    pairs=st.integers(1, 5),
    rest=st.integers(0, 4),
    batch=st.integers(1, 3),
    tokens=st.integers(1, 6),
    late=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_rotary_embedding_is_one_operator(
    heads: int, pairs: int, rest: int, batch: int, tokens: int, late: bool, seed: int
) -> None:
    width = 2 * (pairs + rest)
    model = passes.run(rotary_model(heads, width, 2 * pairs, late=late), (), "ort")
    assert kinds(model).count("RotaryEmbedding") == 1
    assert {"Neg", "Mul", "Add"}.isdisjoint(kinds(model))
    random = np.random.default_rng(seed)
    x = random.standard_normal((batch, heads, tokens, width)).astype(np.float32)
    angle = random.uniform(-9, 9, (batch, tokens, pairs)).astype(np.float32)
    cos, sin = np.cos(angle), np.sin(angle)
    feeds = {"x0": x, "angle": angle} if late else {"x0": x, "cos": cos, "sin": sin}
    (y,) = run(model, feeds)
    np.testing.assert_allclose(y, rotate(x, cos, sin), atol=3e-6)


def test_layers_share_the_tables_of_angles() -> None:
    model = passes.run(rotary_model(2, 8, 4, layers=3), (), "ort")
    assert kinds(model).count("RotaryEmbedding") == 3
    assert kinds(model).count("Range") == 1


def test_a_second_run_changes_nothing() -> None:
    once = passes.run(rotary_model(2, 8, 8, layers=2), (), "ort")
    again = passes.rewrite(once, (), target="ort")
    assert not [record.name for record in again.records if record.changed]


@pytest.mark.parametrize(
    "changed", [{"half": [3]}, {"axis": [2]}, {"zero": [1]}], ids=["halves", "axis", "start"]
)
def test_other_slices_are_left_alone(changed: dict[str, list[int]]) -> None:
    given = rotary_model(2, 8, 8, **changed)
    assert sorted(kinds(passes.run(given, (), "ort"))) == sorted(kinds(given))


def test_a_candidate_that_computes_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The operator would rotate neighbours: the comparison with the nodes says that it differs."""
    from linexport.passes.ort import rotary

    real = rotary.gs.Node

    def interleaved(op: str, *rest: Any, **named: Any) -> Any:
        made = real(op, *rest, **named)
        if op == "RotaryEmbedding":
            made.attrs["interleaved"] = 1
        return made

    monkeypatch.setattr(rotary.gs, "Node", interleaved)
    given = rotary_model(2, 8, 8, layers=2)
    with caplog.at_level(logging.DEBUG, logger="linexport.passes"):
        written = passes.run(given, (), "ort")
    assert sorted(kinds(written)) == sorted(kinds(given))
    assert "would differ by" in caplog.text


def test_other_targets_have_no_passes_of_their_own() -> None:
    assert target_passes("onnx") == ()
    assert {found.stage for found in target_passes("ort")} == {TARGET}
