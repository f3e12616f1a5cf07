"""Sizes of a Reshape that a file computes, as constants where stated shapes say what they are."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from linexport.plugins.ops.shapes import Dim
from linexport.targets.base import OrtSession
from linexport.targets.cpu_fusion.sizes import constant_sizes, with_constant_sizes


@pytest.mark.parametrize(
    "before, after, sizes",
    [
        (("batch", "seq", 512), ("batch", "seq", 8, 64), [0, 0, 8, 64]),
        (("batch", 8, "seq", 64), ("batch", 2, "4*seq", 64), [0, 2, -1, 64]),
        (("batch", 8, 64), ("batch", 512), [0, 512]),
        (("seq", 4, 2), ("8*seq",), [-1]),
        ((3, 4), (12,), [12]),
        (("batch*seq", 512), ("batch", "seq", 512), None),  # two sizes to infer
        (("seq", "batch"), ("batch", "seq"), None),  # as many elements, other axes
        (("batch", "seq", "past"), ("batch", "seq", "past*1"), None),  # of no tokens none is known
        (("batch", None), ("batch", None), [0, -1]),  # unknown ones need not be the same
        (("batch", 0), ("batch", 0, 3), None),
    ],
)
def test_sizes(before: tuple[Dim, ...], after: tuple[Dim, ...], sizes: list[int] | None) -> None:
    assert constant_sizes(before, after) == sizes


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(data=st.data())
def test_sizes_are_those_of_every_call(data: st.DataObject) -> None:
    """NumPy's reshape with what ONNX says of 0 and -1; lengths of zero among the calls."""
    dims = st.sampled_from(["b", "t", "4*t", 2, 3, None])
    before = data.draw(st.lists(dims, min_size=1, max_size=4))
    after = data.draw(st.lists(dims, min_size=1, max_size=4))
    batch = data.draw(st.integers(1, 3))
    length = data.draw(st.integers(0, 4))
    hidden = data.draw(st.integers(1, 5))
    values = {"b": batch, "t": length, "4*t": 4 * length, None: hidden}
    shape = [values.get(d, d) for d in before]
    wanted = [values.get(d, d) for d in after]
    sizes = constant_sizes(before, after)
    if sizes is None or prod(shape) != prod(wanted) or before[0] not in ("b", 2, 3):
        return
    filled = [shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    assert prod(size for size in filled if size >= 0) > 0 or -1 not in filled
    assert np.zeros(shape).reshape(filled).shape == tuple(wanted)


def computed(before: list[int | str], after: list[int | str], parts: list[str]) -> onnx.ModelProto:
    """x in another shape, whose sizes are of x's shape or constants."""
    nodes, names = [helper.make_node("Shape", ["x"], ["shape"])], []
    for place, part in enumerate(parts):
        nodes.append(helper.make_node("Constant", [], [f"c{place}"], value_ints=[int(part)]))
        if not part.startswith("+"):
            names.append(f"c{place}")
            continue
        nodes.append(helper.make_node("Gather", ["shape", f"c{place}"], [f"g{place}"]))
        names.append(f"g{place}")
    nodes.append(helper.make_node("Concat", names, ["sizes"], axis=0))
    nodes.append(helper.make_node("Reshape", ["x", "sizes"], ["y"], allowzero=1))
    nodes.append(helper.make_node("Neg", ["y"], ["z"]))
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "computed",
        [info("x", TensorProto.FLOAT, before)],
        [info("z", TensorProto.FLOAT, after)],
        value_info=[info("y", TensorProto.FLOAT, after)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize("length", [0, 1, 5])
def test_results_are_the_same(length: int) -> None:
    """Of no tokens, too, where the file has allowzero=1."""
    model = computed(["batch", "seq", 6], ["batch", "seq", 2, 3], ["+0", "+1", "2", "3"])
    made = with_constant_sizes(model)
    reshape = next(n for n in made.graph.node if n.op_type == "Reshape")
    assert reshape.input[1] in {t.name for t in made.graph.initializer}
    assert "sizes" in {name for n in model.graph.node for name in n.input}, "the model was changed"
    x = {"x": np.random.default_rng(0).normal(size=(2, length, 6)).astype(np.float32)}
    want, got = (OrtSession(m.SerializeToString(), threads=1).run(x)["z"] for m in (model, made))
    np.testing.assert_array_equal(got, want)


def test_sizes_that_are_not_known_stay_computed() -> None:
    model = computed(["tokens", 6], ["batch", "seq", 6], ["+0", "1", "6"])
    assert with_constant_sizes(model) is model
