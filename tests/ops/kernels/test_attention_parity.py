"""LinearAttention's kernels against the op's float64 oracle, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linexport.plugins.kernels.fit import variants
from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from tests.support import kernels
from tests.support.layouts import Layout, layouts

pytestmark = pytest.mark.services

DTYPES = ("float32", "float16", "bfloat16")
MAPS = ("relu", "elu1", "exp", "taylor2", "quadratic", "quadratic+c", "favor+")
RULES = ("linear", "gated", "delta", "gated_delta")


def layout(rule: str = "linear", heads: Any = (2, 2, 2), **more: Any) -> Any:
    """A node of that rule."""
    fields = {n: more.pop(n) for n in ("causal", "normalize", "scale", "eps") if n in more}
    spec = LinearAttentionSpec(heads[0], heads[1], rule, **fields)
    return Layout(spec, heads[2], **more)


def draw_and_check(data: Any, dtype: str, longest: int) -> None:
    """Any layout, length and number of segments; in place where there is a past."""
    drawn = data.draw(layouts(dtype=dtype))
    widths = data.draw(st.sampled_from([(16, 16), (20, 24), (5, 33), (33, 8), (1, 1)]))
    # Kernels take decays that are multiplied out.
    drawn = replace(drawn, d_k=widths[0], d_v=widths[1], factored=False)
    if drawn.spec.normalize and drawn.spec.eps == 0 and drawn.masked and not drawn.past:
        drawn = replace(drawn, masked=False)  # a masked first token divides zero by zero
    longest = longest // 4 if drawn.per_channel else longest
    length = data.draw(st.integers(0, longest))
    multiprocessors = data.draw(st.sampled_from([1, 64]))
    in_place = drawn.past and data.draw(st.booleans())
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    case = kernels.Case(drawn)
    case.check(rng, data.draw(st.integers(1, 2)), length, multiprocessors, in_place)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_equals_the_oracle(dtype: str, data: Any) -> None:
    draw_and_check(data, dtype, 100)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_equals_the_oracle_on_a_large_grid(dtype: str, data: Any) -> None:
    draw_and_check(data, dtype, 700)


@pytest.mark.parametrize(
    ("rule", "more"),
    [
        ("linear", {"normalize": True, "eps": 1e-3}),
        ("gated", {"normalize": True, "eps": 1e-3}),
        ("delta", {}),
        ("gated_delta", {"per_channel": True}),
    ],
)
def test_segments_give_what_one_pass_gives(rule: str, more: dict[str, Any]) -> None:
    node = layout(rule, past=True, masked=True, d_k=16, d_v=16, **more)
    case = kernels.Case(node)
    tensors = case.inputs(np.random.default_rng(1), 1, 300)
    assert case.plan().symbols(1, 300, 1)["segments"] == 1
    assert case.plan().symbols(1, 300, 64)["segments"] > 1
    once, parts = case.run(tensors), case.run(tensors, 64)
    kernels.assert_close(parts, tuple(once), tuple(once), 2e-6)


@pytest.mark.parametrize(
    ("rule", "dtype", "width"),
    [
        ("gated_delta", "float32", 20),
        ("delta", "bfloat16", 16),
        pytest.param("delta", "float32", 70, marks=pytest.mark.slow),
        pytest.param("gated_delta", "float16", 33, marks=pytest.mark.slow),
    ],
)
def test_delta_rules_in_segments(rule: str, dtype: str, width: int) -> None:
    """Segments that are composed as affine maps of the state; the state updated in place."""
    node = layout(rule, (2, 2, 1), past=True, masked=True, d_k=width, d_v=24, dtype=dtype)
    case = kernels.Case(node)
    length = 3 * 8 * case.plan().chunk + 5
    assert case.plan().symbols(1, length, 64)["segments"] == 3
    case.check(np.random.default_rng(10), 1, length, 64, in_place=True)


class SmallerParts(kernels.Case):
    """Kernels that may go through d_k in smaller parts do."""

    def plan(self) -> Any:
        """The launches of the node, with those."""
        planned = super().plan()
        smaller = {
            kernel: next((x for x in variants(kernel) if x.constants != kernel.constants), kernel)
            for kernel in planned.kernels()
        }
        assert any(one != other for one, other in smaller.items())
        return planned.with_kernels(smaller)


@pytest.mark.parametrize(
    ("dtype", "width", "channel"),
    [
        ("float32", 20, False),
        pytest.param("bfloat16", 70, False, marks=pytest.mark.slow),
        pytest.param("float16", 40, True, marks=pytest.mark.slow),
    ],
)
def test_transitions_sum_products_over_parts(dtype: str, width: int, channel: bool) -> None:
    node = layout(
        "gated_delta", (2, 1, 1), past=True, masked=True, per_channel=channel, d_k=width, d_v=24,
        dtype=dtype,
    )  # fmt: skip
    case = SmallerParts(node)
    length = 3 * 8 * case.plan().chunk + 5
    assert case.plan().symbols(1, length, 64)["segments"] == 3
    case.check(np.random.default_rng(14), 1, length, 64)


IN_PARTS = [
    pytest.param(rule, channel, sm, part, marks=pytest.mark.slow if slow else ())
    for rule, channel, sm, part, slow in [
        *((rule, False, 90, 32, rule != "gated_delta") for rule in RULES),
        *((rule, False, 80, 16 if rule == "gated" else 32, rule != "linear") for rule in RULES),
        ("gated_delta", True, 80, 32, True),
    ]
]


@pytest.mark.parametrize(("rule", "channel", "sm", "part"), IN_PARTS)
def test_heads_in_parts(rule: str, channel: bool, sm: int, part: int) -> None:
    """float32 heads whose last part is not full: in one segment, in place, and in several."""
    node = layout(
        rule, heads=(2, 1, 1), normalize=rule in ("linear", "gated"), eps=1.0, past=True,
        masked=True, per_channel=channel, d_k=70, d_v=20,
    )  # fmt: skip
    case = kernels.Case(node, sm=sm)
    functions = {k.function: dict(k.constants) for k in case.plan().kernels()}
    assert functions["linear.segment_output"]["BLOCK_K"] == part
    rng = np.random.default_rng(9)
    case.check(rng, 2, 21, in_place=True)
    if rule == "gated":
        assert case.plan().symbols(1, 260, 64)["segments"] > 1
        case.check(rng, 1, 260, 64)


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        ("gated", "bfloat16"),
        ("gated_delta", "float32"),
        *(
            pytest.param(rule, dtype, marks=pytest.mark.slow)
            for rule, dtype in (("gated", "float32"), ("gated_delta", "bfloat16"))
        ),
        *(
            pytest.param(rule, "float16", marks=pytest.mark.slow)
            for rule in ("gated", "gated_delta")
        ),
    ],
)
def test_channel_decays_of_grouped_queries(rule: str, dtype: str) -> None:
    """Scores of every query head, in parts of d_k, of decays from none to a reset."""
    node = layout(
        rule, (4, 2, 1), per_channel=True, past=True, masked=True, d_k=40, d_v=20, dtype=dtype,
        normalize=rule == "gated", eps=1.0,
    )  # fmt: skip
    case = kernels.Case(node)
    rng = np.random.default_rng(11)
    for length, multiprocessors in ((0, 1), (5, 1), (37, 1), (260, 64)):
        tensors = case.inputs(rng, 1, length)
        for name, share in (("zeros", 0.2), ("resets", 0.05), ("strong", 0.1)):
            chosen = torch.from_numpy(rng.random(tensors["decay"].shape) < share)
            value = {"zeros": 0.0, "resets": -np.inf, "strong": -70.0}[name]
            tensors["decay"][chosen] = value
        got = case.run(tensors, multiprocessors)
        wanted, scale = case.wanted(tensors), case.magnitude(tensors)
        kernels.assert_close(got, wanted, scale, kernels.TOLERANCE[dtype])


@pytest.mark.parametrize("rule", RULES)
def test_decoding_goes_on_from_prefill(rule: str) -> None:
    """50 tokens at once, then three one by one in place: what 53 at once give."""
    node = layout(rule, past=True, d_k=16, d_v=20)
    case = kernels.Case(node)
    tensors = case.inputs(np.random.default_rng(2), 2, 53)
    wanted = case.wanted(tensors)
    parts = []
    state = tensors["past_state"]
    for cut in (slice(0, 50), slice(50, 51), slice(51, 52), slice(52, 53)):
        piece = {n: x[:, cut].contiguous() for n, x in tensors.items() if n != "past_state"}
        output, _ = case.run({**piece, "past_state": state}, in_place=True)
        parts.append(output)
    got = [np.concatenate(parts, 1), kernels.wide(state)]
    kernels.assert_close(got, wanted, case.magnitude(tensors), 1e-5)


@pytest.mark.parametrize("length", [3, 40])
@pytest.mark.parametrize("channel", [False, True])
def test_a_decay_of_minus_infinity_forgets(channel: bool, length: int) -> None:
    node = layout("gated", past=True, per_channel=channel, d_k=16, d_v=16)
    case = kernels.Case(node)
    tensors = case.inputs(np.random.default_rng(3), 1, length)
    tensors["decay"][:, length // 2] = -np.inf
    tensors["decay"][:, -2] = -200.0
    got = case.run(tensors)
    kernels.assert_close(got, case.wanted(tensors), case.magnitude(tensors), 1e-5)


@pytest.mark.parametrize("channel", [False, True])
def test_mild_decays_keep_their_digits_behind_strong_ones(channel: bool) -> None:
    """Sums of -900 and more in each chunk, of which the mild decays are the last digits."""
    node = layout("gated", past=True, per_channel=channel, d_k=16, d_v=16)
    case = kernels.Case(node)
    tensors = case.inputs(np.random.default_rng(3), 1, 40)
    tensors["decay"] *= 0.01
    tensors["decay"][:, torch.arange(40) % 16 < 12] = -79.0
    got = case.run(tensors)
    kernels.assert_close(got, case.wanted(tensors), case.magnitude(tensors), 1e-6)


def test_half_precision_survives_large_states_and_scores() -> None:
    """States and scores beyond float16, whose ratios are not."""
    node = layout(normalize=True, past=True, d_k=16, d_v=16, dtype="float16")
    case = kernels.Case(node)
    tensors = case.inputs(np.random.default_rng(4), 1, 60)
    for name in ("query", "key"):
        tensors[name] *= 200
    for name in ("past_state", "past_normalizer"):
        tensors[name] *= 1e6
    got = case.run(tensors)
    kernels.assert_close(got, case.wanted(tensors), case.magnitude(tensors), 1e-3)


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("length", [2, 45])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_feature_maps(kind: str, length: int, dtype: str) -> None:
    width, features, phi, parameter = kernels.maps()[kind]
    node = layout(
        heads=(4, 2, 1), normalize=True, eps=1.0, past=True, masked=True,
        d_k=features, d_v=12, dtype=dtype,
    )  # fmt: skip
    case = kernels.Case(node, (kind.removesuffix("+c"), phi), width, parameter)
    case.check(np.random.default_rng(6), 1, length)


@pytest.mark.parametrize(("kind", "causal"), [("elu1", True), ("taylor2", False), ("favor+", True)])
def test_fused_feature_maps_in_segments(kind: str, causal: bool) -> None:
    width, features, phi, parameter = kernels.maps()[kind]
    node = layout(normalize=True, eps=1.0, causal=causal, d_k=features, d_v=12, masked=True)
    case = kernels.Case(node, (kind, phi), width, parameter)
    assert case.plan().symbols(1, 300, 64)["segments"] > 1
    case.check(np.random.default_rng(7), 1, 300, 64)


def test_a_projection_wider_than_registers_is_read_in_slices() -> None:
    """In a step; the last slice is short, as are the last features."""
    width, features = 140, 150
    w = np.random.default_rng(3).normal(size=(width, features)).astype(np.float32)
    phi = kernels.projected(w)
    node = layout(normalize=True, eps=1.0, past=True, d_k=features, d_v=12)
    case = kernels.Case(node, ("favor+", phi), width, w)
    case.check(np.random.default_rng(4), 1, 2)


@pytest.mark.parametrize("rule", ["delta", "gated_delta"])
def test_systems_of_wide_keys_in_float32_are_sums_of_parts(rule: str) -> None:
    node = layout(rule, (1, 1, 1), d_k=150, d_v=9, scale=150**-0.5)
    case = kernels.Case(node)
    inverse = case.plan().single.launches[0].kernel
    assert inverse.function == "delta.chunk_inverse"
    assert dict(inverse.constants)["BLOCK_K"] == 64
    case.check(np.random.default_rng(8), 1, 21)


@pytest.mark.parametrize("rule", ["linear", "gated"])
def test_features_of_wide_heads_in_memory(rule: str) -> None:
    """In one segment, in place, and in several; of more than one block of rows, the last short."""
    _, _, phi, _ = kernels.maps()["elu1"]
    node = layout(
        rule, (4, 2, 2), normalize=True, eps=1.0, past=True, masked=True, d_k=70, d_v=20,
        dtype="bfloat16",
    )  # fmt: skip
    case = kernels.Case(node, ("elu1", phi))
    assert case.plan().single.launches[0].kernel.function == "feature_map.apply"
    rng = np.random.default_rng(13)
    for length in (3, 21):
        case.check(rng, 2, length, in_place=True)
    length = 2 * 8 * case.plan().chunk + 5
    assert case.plan().symbols(1, length, 64)["segments"] > 1
    case.check(rng, 1, length, 64)


@pytest.mark.parametrize("rule", ["gated", "gated_delta"])
@pytest.mark.parametrize("kind", ["elu1", "taylor2", "favor+"])
def test_channel_decays_of_fused_feature_maps(kind: str, rule: str) -> None:
    """Features with their decays in memory, in float32 for a map of degree two."""
    width, features, phi, parameter = kernels.maps()[kind]
    node = layout(
        rule, (4, 2, 1), normalize=rule == "gated", eps=1.0, past=True, masked=True,
        per_channel=True, d_k=features, d_v=12, dtype="bfloat16",
    )  # fmt: skip
    case = kernels.Case(node, (kind, phi), width, parameter)
    case.check(np.random.default_rng(12), 1, 45)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 128, 200, 256])
def test_wide_heads(rule: str, dtype: str, width: int) -> None:
    node = layout(rule, d_k=width, d_v=width, past=True, scale=width**-0.5, dtype=dtype)
    kernels.Case(node).check(np.random.default_rng(8), 1, 100)
