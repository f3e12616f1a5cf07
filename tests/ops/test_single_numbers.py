"""Gated LinearAttention of heads of one number, against the oracle, and where it is chosen."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linexport.plugins.ops.linear_attention import OP, LinearAttentionSpec
from linexport.plugins.ops.recurrence import CHUNK
from tests.support import runtimes
from tests.support.layouts import Layout

HEADS = 6
ROUNDING = {"float32": 0.0, "float16": 2.0**-10}


def layout(queries: int, keys: int, normalize: bool = False, **changes: object) -> Layout:
    spec = LinearAttentionSpec(queries, HEADS, "gated", normalize=normalize, scale=0.5, eps=1e-3)
    return Layout(spec, keys, d_k=1, d_v=1, past=True, **changes)  # type: ignore[arg-type]


def check(case: Layout, model: onnx.ModelProto, lengths: tuple[int, ...]) -> None:
    run, rng = runtimes.on_onnxruntime(model), np.random.default_rng(0)
    outputs = 3 if case.spec.normalize else 2
    for length in lengths:
        x = case.inputs(rng, 2, length)
        if case.spec.normalize:  # denominators are sums of what is positive
            x |= {n: np.abs(x[n]) for n in ("query", "key", "past_normalizer")}
        found, expected, size = run(x), case.reference(x), case.magnitude(x)
        for place in range(outputs):
            assert found[place].shape == expected[place].shape
            rounding = 0.0 if place else ROUNDING[case.dtype]
            limit = 3e-6 * size[place] + rounding * np.abs(expected[place]) + 1e-7
            assert (np.abs(found[place] - expected[place]) <= limit).all()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, HEADS), (HEADS, 1), (HEADS, HEADS)])
def test_equals_the_oracle(queries: int, keys: int, normalize: bool, masked: bool) -> None:
    """Chunks that are full, that are not, one token, and none."""
    case = layout(queries, keys, normalize, masked=masked)
    model = case.model(choose=lambda *_: OP.portable)
    onnx.checker.check_model(model, full_check=True)
    check(case, model, (0, 1, 2, CHUNK, CHUNK + 1, 70))


def test_half_precision_keeps_its_state_in_float32() -> None:
    case = layout(1, 1, dtype="float16")
    check(case, case.model(choose=lambda *_: OP.portable), (1, 65))


@settings(max_examples=20, deadline=None)
@given(length=st.integers(1, 40), seed=st.integers(0, 2**20))
def test_decays_of_any_size(length: int, seed: int) -> None:
    """0, -inf and what underflows: no quotient is formed, and no product of two zeros."""
    case = layout(1, 1)
    run = runtimes.on_onnxruntime(case.model(choose=lambda *_: OP.portable))
    draw = np.random.default_rng(seed)
    x = case.inputs(draw, 1, length)
    x["decay"] = draw.choice(np.array([0, -1e-3, -1, -90, -np.inf], np.float32), x["decay"].shape)
    compared = (run(x)[:2], case.reference(x)[:2], case.magnitude(x)[:2])
    for found, expected, size in zip(*compared, strict=True):
        assert (np.abs(found - expected) <= 3e-6 * size + 1e-30).all()


def test_in_onnx_s_evaluator() -> None:
    case = layout(HEADS, HEADS)
    run = runtimes.on_reference(case.model(choose=lambda *_: OP.portable))
    x = case.inputs(np.random.default_rng(1), 2, CHUNK + 3)
    for found, expected in zip(run(x)[:2], case.reference(x)[:2], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
