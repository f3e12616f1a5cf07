"""Softmax attention over a cache as one node, against its definition in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from linexport.targets.base import OrtSession
from linexport.targets.cpu_fusion import with_programs
from linexport.targets.cpu_fusion.cached_attention import MASK, OP
from linexport.targets.cpu_fusion.chains import OP as CHAIN
from linexport.targets.cpu_fusion.chains import with_chains
from tests.support.cached_attention import LOW, OUTPUTS, Sizes, draw, model, oracle
from tests.support.native import on_library, session
from tests.support.runtimes import Arrays

HEADS = ((1, 1), (2, 2), (4, 2), (6, 2), (8, 1), (17, 1), (6, 3))
PLAIN = Sizes()
EACH: tuple[int | str, ...] = ("B", "T")


def fused(sizes: Sizes, masks: int | str = "B") -> onnx.ModelProto:
    made = with_programs(model(sizes, masks))
    kinds = [node.op_type for node in made.graph.node]
    assert OP in kinds
    assert not {"Softmax", "MatMul", "RotaryEmbedding", "Where"} & {*kinds}
    return made


def check(got: list[np.ndarray], sizes: Sizes, x: Arrays) -> None:
    """Scores carry a rounding of their size, and weights with them; caches have what was given."""
    want = oracle(sizes, x)
    reach = np.abs(x["query"]).max(initial=0) * max(
        np.abs(x[name]).max(initial=0) for name in ("key", "past_key")
    )
    largest = sizes.d_k * float(reach) * abs(1 if sizes.scale is None else sizes.scale)
    values = max(np.abs(x[name]).max(initial=0) for name in ("value", "past_value"))
    bounds = 4 * values * (1e-6 + 2.0**-22 * largest), 4e-6 if sizes.half else 0, 0
    for one, expected, bound in zip(got, want, bounds, strict=True):
        assert (one.shape, one.dtype) == (expected.shape, np.float32)
        np.testing.assert_allclose(one, expected, rtol=0, atol=bound)


@pytest.mark.smoke
@settings(max_examples=120, derandomize=True, deadline=None, database=None)
@given(
    heads=st.sampled_from(HEADS),
    d_k=st.one_of(st.integers(1, 20), st.sampled_from([64, 65, 128])),
    d_v=st.one_of(st.integers(1, 20), st.sampled_from([32, 64, 129])),
    turned=st.booleans(),
    packed=st.booleans(),
    scale=st.sampled_from([None, 0.125, 1.0]),
    batch=st.integers(0, 2),
    length=st.sampled_from([0, 1, 2, 3, 4, 5, 15, 16, 17, 64, 65, 130]),
    past=st.sampled_from([0, 1, 7, 15, 16, 63, 64, 65, 127, 300]),
    hidden=st.sampled_from([LOW, -np.inf, -5.0]),
    mask=st.sampled_from(["each", "one", "seen", "seen"]),
    threads=st.integers(1, 4),
    angles=st.sampled_from([EACH, (1, "T"), ("T",)]),
    apart=st.booleans(),
)
@example((8, 1), 128, 64, True, True, 0.125, 2, 200, 1000, LOW, "each", 2, EACH, False)
@example((8, 1), 128, 64, True, True, 0.125, 2, 200, 1000, LOW, "seen", 2, EACH, False)
@example((8, 2), 64, 40, False, True, 0.125, 2, 2, 1300, LOW, "seen", 3, EACH, False)
@example((3, 1), 20, 20, False, True, 1.0, 1, 3, 1021, -np.inf, "each", 4, EACH, False)
def test_equals_oracle(
    heads: tuple[int, int],
    d_k: int,
    d_v: int,
    turned: bool,
    packed: bool,
    scale: float | None,
    batch: int,
    length: int,
    past: int,
    hidden: float,
    mask: str,
    threads: int,
    angles: tuple[int | str, ...],
    apart: bool,
) -> None:
    half = d_k // 3 if turned else 0
    sizes = Sizes(*heads, d_k, d_v, half, packed, scale, mask == "seen", angles, apart)
    x, masks = draw(sizes, batch, length, past, hidden), 1 if mask == "one" and batch else "B"
    if masks == 1:
        x["mask"] = x["mask"][:1]
    check(on_library(fused(sizes, masks), threads)(x), sizes, x)


@pytest.mark.parametrize("length", [1, 40, 100])
@pytest.mark.parametrize("past", [0, 70, 200])
def test_queries_that_see_no_key(length: int, past: int) -> None:
    """A large number swallows the scores, and all keys weigh the same."""
    x = draw(PLAIN, 2, length, past, LOW)
    x["mask"][1, :, : length // 2 + 1] = LOW
    got = on_library(fused(PLAIN))(x)
    check(got, PLAIN, x)
    alike = x["past_value"][1].sum(1) + x["value"][1].reshape(length, 2, 6).sum(0)
    np.testing.assert_allclose(
        got[0][1, 0].reshape(2, 2, 6)[:, 0], alike / (past + length), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("length", [1, 100])
def test_keys_that_no_query_sees(length: int) -> None:
    """The same of a mask that is not made."""
    sizes = replace(PLAIN, seen=True)
    x = draw(sizes, 2, length, 70, LOW)
    x["key_mask"][1] = 0
    x["key_mask"][0, :3] = 7  # any number but zero
    check(on_library(fused(sizes))(x), sizes, x)


@pytest.mark.parametrize("past", [30, 600])
@pytest.mark.parametrize("length", [1, 100])
def test_no_weight_is_no_number(length: int, past: int) -> None:
    """As of Softmax: where every score is -infinity, or one is no number."""
    x = draw(PLAIN, 1, length, past, LOW)
    x["mask"][0, :, 0] = -np.inf
    assert np.isnan(on_library(fused(PLAIN))(x)[0][0, 0]).all()
    x = draw(PLAIN, 1, length, past, LOW)
    x["mask"][0, :, 0, :] = 0
    x["past_key"][0, 0, 3] = np.nan
    got = on_library(fused(PLAIN))(x)[0][0, 0].reshape(2, 2, 6)
    assert np.isnan(got[0]).all()
    assert np.isfinite(got[1]).all()


@pytest.mark.parametrize("past", [300, 900])
@pytest.mark.parametrize("length", [3, 100])
def test_scores_that_grow_and_fall_with_every_key(length: int, past: int) -> None:
    """Maxima change in every block of keys, by more than a float's exponent holds."""
    sizes = replace(PLAIN, scale=1.0)
    for order in (1, -1):
        x = draw(sizes, 1, length, past, 0.0)
        x["query"] = np.full_like(x["query"], 1.0)
        x["key"][:] = 0
        x["past_key"] = np.zeros_like(x["past_key"])
        x["past_key"][:, :, :, 0] = np.linspace(-300, 300, past, dtype=np.float32)[::order]
        check(on_library(fused(sizes))(x), sizes, x)


def test_one_by_one_is_all_at_once() -> None:
    sizes = Sizes(8, 2, 16, 16, 4)
    run, x = on_library(fused(sizes)), draw(sizes, 2, 90, 40, LOW)
    want, caches = run(x), [x["past_key"], x["past_value"]]
    found = []
    for start, end in ((0, 1), (1, 2), (2, 4), (4, 60), (60, 61), (61, 90)):
        part = {n: x[n][:, start:end] for n in ("query", "key", "value", "angle")}
        part |= {"past_key": caches[0], "past_value": caches[1]}
        part["mask"] = x["mask"][:, :, start:end, : 40 + end]
        output, *caches = run(part)
        found.append(output)
    np.testing.assert_allclose(np.concatenate(found, 1), want[0], rtol=0, atol=2e-6)
    for cache, expected in zip(caches, want[1:], strict=True):
        np.testing.assert_array_equal(cache, expected)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("length", [1, 130])
def test_same_bits_whatever_the_threads(heads: tuple[int, int], length: int) -> None:
    sizes = Sizes(*heads, 64, 64, 16)
    x, made = draw(sizes, 1, length, 1000, LOW), fused(sizes)
    alone, *others = (on_library(made, threads)(x) for threads in (1, 1, 2, 3, 5))
    for other in others:
        for one, two in zip(alone, other, strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("offset", [4, 20])
@pytest.mark.parametrize("length", [1, 70])
def test_memory_that_is_not_aligned(length: int, offset: int) -> None:
    sizes = Sizes(4, 2, 20, 12)
    x, opened = draw(sizes, 1, length, 33, LOW), session(fused(sizes))
    want, moved = opened.run(None, x), {}
    for name, array in x.items():
        memory = np.empty(array.nbytes + offset + 64, np.uint8)
        start = -memory.ctypes.data % 64 + offset
        moved[name] = memory[start : start + array.nbytes].view(np.float32).reshape(array.shape)
        moved[name][:] = array
    for one, two in zip(opened.run(None, moved), want, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("sizes", [PLAIN, Sizes(3, 3, 8, 5, 2, False, None), Sizes(seen=True)])
@pytest.mark.parametrize("length", [0, 1, 20])
def test_runs_without_the_library(sizes: Sizes, length: int) -> None:
    x = draw(sizes, 2, length, 9, LOW)
    for made in (fused(sizes), with_chains(fused(sizes))):
        onnx.checker.check_model(made)  # a runtime that had the library before knows its domain
        opened = OrtSession(made.SerializeToString(), 1).run(x)
        check([opened[name] for name in OUTPUTS], sizes, x)


@pytest.mark.parametrize("seen", [False, True])
def test_joins_chains(seen: bool) -> None:
    sizes = Sizes(4, 2, 8, 8, 2, seen=seen)
    made, x = with_chains(fused(sizes)), draw(sizes, 2, 7, 9, LOW)
    assert [n.op_type for n in made.graph.node if n.domain] == [CHAIN]
    check(on_library(made)(x), sizes, x)


def nodes_of(made: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {node.output[0]: node for node in made.graph.node}


def attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto:
    return next(a for a in node.attribute if a.name == name)


def read_elsewhere(name: str) -> Callable[[onnx.ModelProto], None]:
    def edit(made: onnx.ModelProto) -> None:
        made.graph.node.append(helper.make_node("Identity", [name], ["copy"]))
        made.graph.output.append(helper.make_tensor_value_info("copy", TensorProto.FLOAT, None))

    return edit


def constant(made: onnx.ModelProto, old: object, new: object) -> None:
    tensor = next(t for t in made.graph.initializer if t.name == f"constant {old}")
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(new), tensor.name))


def sizes_of(made: onnx.ModelProto, name: str, axis: int, size: int | str) -> None:
    every = (*made.graph.input, *made.graph.value_info, *made.graph.output)
    dims = next(v for v in every if v.name == name).type.tensor_type.shape.dim
    setattr(dims[axis], "dim_value" if isinstance(size, int) else "dim_param", size)


OTHERS: dict[str, Callable[[onnx.ModelProto], Any]] = {
    "another axis": lambda m: setattr(attribute(nodes_of(m)["weights"], "axis"), "i", 2),
    "weights are read elsewhere": read_elsewhere("weights"),
    "keys are read elsewhere": read_elsewhere("keys"),
    "values are read elsewhere": read_elsewhere("values"),
    "the past comes last": lambda m: nodes_of(m)["keys"].input.reverse(),
    "a factor for every token": lambda m: nodes_of(m)["scaled"].input.__setitem__(1, "query"),
    "masks of its own for every row": lambda m: nodes_of(m)["masks"].input.__setitem__(0, "x"),
    "a mask for every head": lambda m: sizes_of(m, "mask", 1, 4),
    "a mask of keys alone": lambda m: sizes_of(m, "mask", 2, 1),
    "a mask of as many keys as there were": lambda m: sizes_of(m, "mask", 3, "P"),
    "heads that are no multiple": lambda m: sizes_of(m, "query_parted", 2, 3),
    "other axes": lambda m: attribute(nodes_of(m)["keys_across"], "perm").ints.__setitem__(3, 1),
    "tables of fewer channels": lambda m: constant(m, [-1, 2], [-1, 1]),
    "positions from one on": lambda m: constant(m, 0, 1),
    "pairs of neighbours": lambda m: nodes_of(m)["key_turned"].attribute.append(
        helper.make_attribute("interleaved", 1)
    ),
}


@pytest.mark.parametrize("edit", OTHERS.values(), ids=OTHERS)
def test_other_nodes_are_left(edit: Callable[[onnx.ModelProto], Any]) -> None:
    made = model(Sizes(half=2))
    edit(made)
    assert OP not in [node.op_type for node in with_programs(made).graph.node]


MASKS: dict[str, Callable[[onnx.ModelProto], Any]] = {
    "numbers from one on": lambda m: nodes_of(m)["numbers"].input.__setitem__(0, "constant 1"),
    "the first numbers": lambda m: nodes_of(m)["rows"].input.__setitem__(2, "constant [1]"),
    "rows of no known length": lambda m: sizes_of(m, "rows", 0, "R"),
    "keys before, not up to": lambda m: setattr(nodes_of(m)["earlier"], "op_type", "Less"),
    "a number that shows": lambda m: constant(m, f"{LOW} as float", np.float32(3)),
    "numbers for hidden and shown": lambda m: nodes_of(m)["mask"].input.__setitem__(
        1, f"constant {LOW} as float"
    ),
    "either": lambda m: setattr(nodes_of(m)["both"], "op_type", "Or"),
    "as many as there were": lambda m: sizes_of(m, "key_mask", 1, "P"),
}


@pytest.mark.parametrize("edit", MASKS.values(), ids=MASKS)
def test_other_masks_are_added(edit: Callable[[onnx.ModelProto], Any]) -> None:
    for changed in (False, True):
        made = model(Sizes(seen=True))
        if changed:
            edit(made)
        [node] = [n for n in with_programs(made).graph.node if n.op_type == OP]
        assert node.input[MASK] == ("mask" if changed else "key_mask")


def test_half_precision_is_left() -> None:
    made = model(PLAIN)
    for value in (*made.graph.input, *made.graph.value_info, *made.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    assert OP not in [node.op_type for node in with_programs(made).graph.node]


@pytest.mark.parametrize("seen", [False, True])
def test_wrong_shapes_are_refused(seen: bool) -> None:
    sizes = replace(PLAIN, seen=seen)
    made = fused(sizes)
    for value in made.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            dim.dim_param = f"{value.name}_{id(dim)}"
    x, opened = draw(sizes, 2, 5, 3, LOW), session(made)
    opened.run(None, x)
    for name, array in x.items():
        for axis in range(array.ndim):
            longer = np.concatenate([array, array[(slice(None),) * axis + (slice(1),)]], axis)
            with pytest.raises(Exception, match=OP):
                opened.run(None, {**x, name: longer})
