"""WindowAttention of the CPU library against the float64 oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from linexport.plugins.ops.window_attention import OP, WindowSpec, window_attention
from tests.support.native import check_in_place, on_library, one_node
from tests.support.runtimes import Arrays
from tests.support.windows import OUTPUTS, window_shapes


def draw(
    wanted: dict[str, tuple[int | str, ...]], spec: WindowSpec, batch: int, length: int, size: float
) -> Arrays:
    rng, sizes = np.random.default_rng(length), {"B": batch, "T": length}
    x = {}
    for name, shape in wanted.items():
        drawn = rng.normal(size=[sizes.get(d, d) for d in shape])  # type: ignore[call-overload]
        if name in ("key_mask", "past_seen"):
            drawn = drawn > -0.5
        elif name == "past_left":
            drawn = rng.integers(0, spec.sinks + 1, drawn.shape)
        elif name in ("query", "key"):
            drawn = size * drawn
        x[name] = drawn if name == "key_mask" else np.float32(drawn)
    for b in range(batch if "past_left" in x else 0):  # rows that no sink has are zeros
        for name in ("past_sink_key", "past_sink_value"):
            x[name][b, int(x["past_left"][b, 0]) :] = 0
    return x


@pytest.mark.smoke
@settings(max_examples=70, derandomize=True, deadline=None, database=None)
@given(
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 1), (40, 2)]),
    widths=st.sampled_from([(1, 1), (8, 5), (16, 16), (33, 40), (64, 64)]),
    window=st.sampled_from([1, 2, 7, 16, 63, 64, 130]),
    sinks=st.sampled_from([0, 0, 1, 3, 20]),
    optional=st.sets(st.sampled_from(["past", "key_mask"])),
    batch=st.integers(0, 3),
    length=st.sampled_from([0, 1, 2, 5, 16, 64, 65, 150]),
    size=st.sampled_from([0.1, 1.0, 8.0]),
    threads=st.integers(1, 3),
)
def test_equals_oracle(
    heads: tuple[int, int],
    widths: tuple[int, int],
    window: int,
    sinks: int,
    optional: set[str],
    batch: int,
    length: int,
    size: float,
    threads: int,
) -> None:
    spec = WindowSpec(*heads, window, sinks, widths[0] ** -0.5)
    wanted = window_shapes(spec, widths, optional)
    x = draw(wanted, spec, batch, length, size)
    got = on_library(one_node(OP.name, wanted, OUTPUTS, **vars(spec)), threads)(x)
    want = dict(zip(OP.output_names, window_attention(spec, **x), strict=True))
    rounding = 2e-6 * (1 + 4 * size * size)
    for name, one in zip(OUTPUTS, got, strict=True):
        assert one.shape == want[name].shape, name
        np.testing.assert_allclose(one, want[name], rtol=rounding, atol=rounding, err_msg=name)


def test_the_mask_of_tokens_that_left_is_that_of_the_oracle() -> None:
    """Outputs of bool are cast, as numbers are in the other tests."""
    spec = WindowSpec(2, 1, 5, 2)
    wanted = window_shapes(spec, (4, 4), {"past", "key_mask"})
    x = draw(wanted, spec, 3, 40, 1.0)
    model = one_node(OP.name, wanted, ("output", "left_mask"), **vars(spec))
    _, got = on_library(model)(x)
    np.testing.assert_array_equal(got, window_attention(spec, **x)[5])


@pytest.mark.parametrize("length", [3, 200])
def test_same_bits_whatever_the_threads(length: int) -> None:
    spec = WindowSpec(2, 1, 70, 2, 0.1)
    wanted = window_shapes(spec, (64, 64), {"past"})
    model, x = one_node(OP.name, wanted, OUTPUTS, **vars(spec)), draw(wanted, spec, 1, length, 1.0)
    one, many = on_library(model)(x), on_library(model, 4)(x)
    for first, second in zip(one, many, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("length", [1, 4, 9, 30])
def test_states_may_be_written_where_they_are_read(length: int) -> None:
    spec = WindowSpec(4, 2, 9, 3, 0.5)
    wanted = window_shapes(spec, (8, 8), {"past", "key_mask"})
    model = one_node(OP.name, wanted, OUTPUTS, **vars(spec))
    check_in_place(model, draw(wanted, spec, 2, length, 1.0), 2)


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16])
def test_half_precision_is_computed_in_float32(kind: int) -> None:
    spec = WindowSpec(4, 2, 20, 1, 0.25)
    wanted = window_shapes(spec, (16, 16), set())
    x = draw(wanted, spec, 2, 50, 1.0)
    (got,) = on_library(one_node(OP.name, wanted, ("output",), kind, **vars(spec)))(x)
    want = window_attention(spec, **x)[0]
    np.testing.assert_allclose(got, want, atol=2e-3 if kind == TensorProto.FLOAT16 else 2e-2)


def test_scores_in_the_thousands_do_not_overflow() -> None:
    spec = WindowSpec(1, 1, 6, 2)
    wanted = window_shapes(spec, (8, 8), {"past"})
    x = draw(wanted, spec, 1, 40, 30.0)
    got = on_library(one_node(OP.name, wanted, ("output",), **vars(spec)))(x)[0]
    np.testing.assert_allclose(got, window_attention(spec, **x)[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"window": 0}, "window is below 1"),
        ({"sinks": -1}, "sinks is below 0"),
        ({"kv_num_heads": 3}, "no multiple of kv_num_heads"),
    ],
)
def test_attributes_without_a_meaning_end_the_opening(
    attributes: dict[str, int], words: str
) -> None:
    spec = WindowSpec(4, 2, 3)
    model = one_node(OP.name, window_shapes(spec, (4, 4), set()), ("output",), **vars(spec))
    node = next(n for n in model.graph.node if n.op_type == OP.name)
    for attribute in node.attribute:
        if attribute.name in attributes:
            attribute.i = attributes[attribute.name]
    with pytest.raises(Exception, match=words):
        on_library(model)


def test_shapes_that_do_not_fit_end_the_call() -> None:
    spec = WindowSpec(2, 2, 3)
    wanted = {**window_shapes(spec, (4, 4), {"past"}), "past_key": ("B", "W", 8)}
    x = draw(window_shapes(spec, (4, 4), {"past"}), spec, 1, 4, 1.0)
    model = one_node(OP.name, window_shapes(spec, (4, 4), {"past"}), ("output",), **vars(spec))
    info = next(i for i in model.graph.input if i.name == "past_key")
    info.type.tensor_type.shape.dim[1].dim_param = "W"
    assert wanted["past_key"][1] == "W"
    x["past_key"] = np.zeros((1, 5, 8), np.float32)
    with pytest.raises(Exception, match="past_key has a wrong shape"):
        on_library(model)(x)
