"""LinearAttention of the CPU library against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linexport.models import feature_maps
from linexport.plugins.ops import feature_map
from linexport.plugins.ops.linear_attention import LinearAttentionSpec, linear_attention
from tests.support.comparison import assert_close
from tests.support.layouts import HEADS, Layout, layouts, mapped_model
from tests.support.native import check_in_place, on_library

RULES = ("linear", "gated", "delta", "gated_delta")
RTOL = {"linear": 1e-6, "gated": 3e-6, "delta": 5e-6, "gated_delta": 5e-6}
WIDTHS = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 96, 128, 255, 256]))
THREADS = st.integers(1, 5)
ELEMENTWISE = [k for k in feature_maps.kinds() if feature_map.formulas(k).elementwise]


def fixed(examples: int) -> settings:
    """The same examples in every run, however slow the machine."""
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None)


def check(layout: Layout, x: dict[str, np.ndarray], threads: int = 1) -> None:
    got = on_library(layout.model(), threads)(x)
    assert_close(got, layout.reference(x), layout.magnitude(x), RTOL[layout.spec.update_rule])


@st.composite
def cases(draw: st.DrawFn, rule: str, widths: st.SearchStrategy[int]) -> Layout:
    """Any layout, of these widths."""
    return replace(draw(layouts(rule)), d_k=draw(widths), d_v=draw(widths))


@pytest.mark.smoke
@pytest.mark.parametrize("rule", RULES)
@fixed(20)
@given(data=st.data())
def test_equals_oracle(rule: str, data: st.DataObject) -> None:
    """Any layout, narrow head, length, batch and thread count."""
    layout = data.draw(cases(rule, st.integers(1, 20)))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = layout.inputs(rng, data.draw(st.integers(0, 3)), data.draw(st.integers(0, 45)))
    check(layout, x, data.draw(THREADS))


@pytest.mark.parametrize("rule", RULES)
@fixed(25)
@given(data=st.data())
def test_one_token(rule: str, data: st.DataObject) -> None:
    """A decode step of any layout, with heads wider than a thread's share of them."""
    widths = st.one_of(st.integers(1, 40), st.sampled_from([64, 127, 128, 160, 200]))
    layout = data.draw(cases(rule, widths))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = layout.inputs(rng, data.draw(st.integers(1, 3)), 1)
    check(layout, x, data.draw(THREADS))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("d_k, d_v", [(64, 64), (33, 129), (256, 17), (1, 256)])
def test_equals_oracle_of_wide_heads(rule: str, d_k: int, d_v: int) -> None:
    layout = Layout(LinearAttentionSpec(2, 2, rule), 1, d_k, d_v, past=True)
    check(layout, layout.inputs(np.random.default_rng(0), 1, 70))


@pytest.mark.parametrize("rule", ["linear", "gated"])
@pytest.mark.parametrize("batch, threads", [(1, 2), (2, 5)])
def test_threads_share_a_stream(rule: str, batch: int, threads: int) -> None:
    """More threads than sequences; states are handed on, and the last chunk is not whole."""
    spec = LinearAttentionSpec(2, 1, rule, normalize=True, scale=0.5, eps=0.25)
    layout = Layout(spec, 1, 24, 70, past=True, masked=True)
    x = layout.inputs(np.random.default_rng(0), batch, 2101)
    run = on_library(layout.model(), threads)
    assert_close(run(x), layout.reference(x), layout.magnitude(x), RTOL[rule])
    for first, again in zip(run(x), run(x), strict=True):
        np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize("rule", ["linear", "gated"])
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (2, 2), (2, 6)])
@fixed(12)
@given(data=st.data())
def test_segments_of_a_sequence(rule: str, heads: tuple[int, int], data: st.DataObject) -> None:
    """Long sequences of few heads: each thread has a segment; their ends meet the last chunk's."""
    normalize, past, masked = (data.draw(st.booleans()) for _ in range(3))
    spec = LinearAttentionSpec(*heads, rule, normalize=normalize, scale=0.5, eps=0.25)
    width = data.draw(st.sampled_from([1, 7, 33, 64]))
    layout = Layout(spec, 1, 9, width, past=past, masked=masked)
    length = data.draw(st.integers(0, 60)) * 16 + 252 + data.draw(st.integers(0, 8))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = layout.inputs(rng, data.draw(st.integers(1, 2)), length)
    if rule == "gated":
        x["decay"] *= np.float32(data.draw(st.sampled_from([1e-3, 1])))
        x["decay"][:, rng.integers(length, size=data.draw(st.integers(0, 2)))] = -np.inf
    check(layout, x, data.draw(st.integers(2, 9)))


@pytest.mark.parametrize("rule", ["linear", "gated"])
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_segments_are_the_same_bits_again(rule: str, threads: int) -> None:
    """At one number of threads, and in place. One thread has no segments, and rounds otherwise."""
    spec = LinearAttentionSpec(1, 1, rule, normalize=True, eps=0.25)
    layout = Layout(spec, 1, 64, 64, past=True, masked=True)
    x = layout.inputs(np.random.default_rng(0), 1, 1100)
    if rule == "gated":
        x["decay"] *= np.float32(1e-3)
    model = layout.model()
    run = on_library(model, threads)
    once, again, alone = run(x), run(x), on_library(model)(x)
    for one, two in zip(once, again, strict=True):
        np.testing.assert_array_equal(one, two)
    assert (once[0] != alone[0]).any()
    assert_close(once, layout.reference(x), layout.magnitude(x), RTOL[rule])
    check_in_place(model, x, threads)


@pytest.mark.parametrize("past", [0, 1e-30])
def test_segments_of_decays_that_grow(past: float) -> None:
    """A segment's product of decays is more than a float holds; the state is a number."""
    layout = Layout(LinearAttentionSpec(1, 1, "gated", normalize=True, eps=0.25), 1, 9, 33, True)
    x = layout.inputs(np.random.default_rng(0), 1, 600)
    x["decay"][:] = 0
    x["decay"][:, 120:240:12] = 12
    x["key"][:, :352] = 0
    x["past_state"] *= np.float32(past)
    x["past_normalizer"] *= np.float32(past)
    check(layout, x, threads=2)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_equals_oracle_at_any_size(rule: str, data: st.DataObject) -> None:
    layout = data.draw(cases(rule, WIDTHS))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    check(layout, layout.inputs(rng, 1, data.draw(st.integers(0, 5000))), data.draw(THREADS))


@pytest.mark.parametrize("rule", ["linear", "gated"])
@fixed(40)
@given(data=st.data())
def test_keys_and_values_of_width_one(rule: str, data: st.DataObject) -> None:
    """Each head is a recurrence of one number; queries and keys are shared by all, or none."""
    heads = data.draw(st.integers(1, 70))
    own_query, own_key, normalize, past, masked = (data.draw(st.booleans()) for _ in range(5))
    spec = LinearAttentionSpec(
        heads if own_query else 1, heads, rule, normalize=normalize, scale=0.5, eps=0.25
    )
    layout = Layout(spec, heads if own_key else 1, 1, 1, past=past, masked=masked)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = layout.inputs(rng, data.draw(st.integers(0, 3)), data.draw(st.integers(0, 45)))
    check(layout, x, data.draw(THREADS))


@pytest.mark.parametrize("normalize", [False, True])
def test_queries_and_keys_of_different_lengths(normalize: bool) -> None:
    spec = LinearAttentionSpec(4, 2, causal=False, normalize=normalize, scale=0.5, eps=1e-6)
    layout = Layout(spec, 1, 9, 33, masked=True)
    model = layout.model()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "S"
    model.graph.output[0].type.tensor_type.shape.dim[1].dim_param = "S"
    rng = np.random.default_rng(0)
    for queries, keys in ((5, 9), (70, 1), (1, 64), (0, 3), (3, 0)):
        x = layout.inputs(rng, 2, keys) | {"query": layout.inputs(rng, 2, queries)["query"]}
        assert_close(on_library(model)(x), layout.reference(x), layout.magnitude(x), 1e-6)


@pytest.mark.parametrize("kind", ELEMENTWISE)
@pytest.mark.parametrize("heads", HEADS)
def test_applies_elementwise_maps(kind: str, heads: tuple[int, int, int]) -> None:
    query_heads, kv_heads, key_heads = heads
    spec = LinearAttentionSpec(query_heads, kv_heads, normalize=kind != "identity", eps=0.25)
    phi = feature_maps.find_map(kind)(9)
    shapes = {
        "query": ("B", "T", query_heads * 9),
        "key": ("B", "T", key_heads * 9),
        "value": ("B", "T", kv_heads * 7),
    }
    rng = np.random.default_rng(0)
    x = {n: rng.normal(size=(2, 37, s[-1])).astype(np.float32) for n, s in shapes.items()}
    got = on_library(mapped_model(spec, phi, shapes))(x)

    def mapped(name: str) -> np.ndarray:
        return np.asarray(phi.phi(torch.from_numpy(x[name].astype(np.float64))))

    q, k, v = mapped("query"), mapped("key"), x["value"].astype(np.float64)
    want = linear_attention(spec, q, k, v)
    magnitude = linear_attention(spec, np.abs(q), np.abs(k), np.abs(v))
    assert_close(got, want, magnitude, 2e-6)


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_maps_of_extreme_values(kind: str) -> None:
    """The features themselves: one token stores phi(k), and the normaliser returns it."""
    positive = [0.0, 1e-30, 1e-3, 0.3, 5, 20, 80, 87, 88.7]
    negative = [-x for x in positive] + [-88, -104, -1e4, -np.inf]
    x = np.array([*positive, *negative, np.nan], np.float32)
    spec = LinearAttentionSpec(1, 1, normalize=True)
    shapes = {n: ("B", "T", w) for n, w in (("query", x.size), ("key", x.size), ("value", 1))}
    phi = feature_maps.find_map(kind)(x.size)
    feeds = {"query": np.zeros((1, 1, x.size), np.float32), "key": x[None, None]}
    feeds["value"] = np.ones((1, 1, 1), np.float32)
    got = on_library(mapped_model(spec, phi, shapes))(feeds)[2][0, 0]
    want = np.asarray(phi.phi(torch.from_numpy(x.astype(np.float64))))
    assert_close([got], [want], [np.abs(want)], 3e-7, 2e-38)


def test_decays_that_forget_all() -> None:
    """exp(-inf) = 0, also where two such tokens follow each other."""
    layout = Layout(LinearAttentionSpec(1, 1, "gated"), 1, d_k=5, d_v=9, past=True)
    x = layout.inputs(np.random.default_rng(0), 1, 11)
    x["decay"][0, [0, 3, 4, 9]] = -np.inf
    check(layout, x)


@pytest.mark.parametrize("threads", [1, 4])
def test_subnormal_numbers_are_zero_in_the_library_only(threads: int) -> None:
    """A state that decays to 1e-39 is zero at once: arithmetic with such numbers is slow."""
    layout = Layout(LinearAttentionSpec(8, 8, "gated"), 8, d_k=64, d_v=64, past=True)
    x = layout.inputs(np.random.default_rng(0), 1, 128)
    x["decay"][:] = -0.7
    x["key"][:] = 0
    state = on_library(layout.model(), threads)(x)[1]
    assert np.abs(layout.reference(x)[1]).max() > 0
    assert not state.any()
    assert np.float32(1e-39) * np.float32(0.5) > 0


@pytest.mark.parametrize(
    "rule, length",
    [(rule, n) for rule in RULES for n in (1, 200)] + [("delta", 3000), ("gated_delta", 3000)],
)
@pytest.mark.parametrize("heads, widths", [(1, (33, 200)), (1, (140, 200)), (16, (64, 64))])
def test_same_bits_whatever_the_threads(
    rule: str, length: int, heads: int, widths: tuple[int, int]
) -> None:
    """Of threads that share value channels, and heads; of the wider, a single token, too."""
    layout = Layout(LinearAttentionSpec(heads, heads, rule), heads, *widths, past=True)
    x = layout.inputs(np.random.default_rng(0), 1, length)
    alone, *others = (on_library(layout.model(), threads)(x) for threads in (1, 2, 3, 5))
    for other in others:
        for one, two in zip(alone, other, strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("rule", ["linear", "gated"])
@pytest.mark.parametrize("heads", [1, 3, 8])
def test_long_sequences_in_pieces(rule: str, heads: int) -> None:
    """Chunks that do not end where a piece does, on threads that share heads and that do not."""
    spec = LinearAttentionSpec(heads, heads, rule, normalize=True, eps=0.25)
    layout = Layout(spec, heads, 17, 40, past=True, masked=True)
    x = layout.inputs(np.random.default_rng(0), 2, 1200)
    run = on_library(layout.model(), threads=4)
    want = layout.reference(x)
    assert_close(run(x), want, layout.magnitude(x), RTOL[rule])
    states = {n: x[n] for n in ("past_state", "past_normalizer")}
    outputs = []
    for start, end in ((0, 15), (15, 31), (31, 1160), (1160, 1161), (1161, 1200)):
        piece = {n: v[:, start:end] for n, v in x.items() if n not in states}
        output, *present = run(piece | states)
        states = dict(zip(states, present, strict=True))
        outputs.append(output)
    got = [np.concatenate(outputs, 1), *states.values()]
    assert_close(got, want, layout.magnitude(x), RTOL[rule])


@pytest.mark.parametrize("d_k", [33, 64])
def test_same_bits_of_a_map_whatever_the_threads(d_k: int) -> None:
    """Of one head, whose features threads compute together."""
    spec = LinearAttentionSpec(1, 1, normalize=True, scale=0.5, eps=0.25)
    shapes = dict.fromkeys(("query", "key"), ("B", "T", d_k)) | {"value": ("B", "T", 200)}
    model = mapped_model(spec, feature_maps.find_map("elu1")(d_k), shapes)
    rng = np.random.default_rng(0)
    for length in (200, 201):
        x = {n: rng.normal(size=(1, length, s[-1])).astype(np.float32) for n, s in shapes.items()}
        alone, *others = (on_library(model, threads)(x) for threads in (1, 2, 3, 5))
        for other in others:
            for one, two in zip(alone, other, strict=True):
                np.testing.assert_array_equal(one, two)
