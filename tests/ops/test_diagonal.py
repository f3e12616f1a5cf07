"""A state of independent elements, token by token, against the oracle."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from linexport.targets.lowering import diagonal
from tests.support import runtimes
from tests.support.layouts import Layout

HEADS = 6


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 0.0), ("float16", 2.0**-11)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("groups", [1, 2, HEADS])
@pytest.mark.parametrize("factored", [False, True])
def test_equals_oracle(
    factored: bool, groups: int, past: bool, masked: bool, dtype: str, rounding: float
) -> None:
    """From no token to many."""
    layout = Layout(
        LinearAttentionSpec(groups, HEADS, "gated", scale=0.5),
        groups,
        d_k=4,
        d_v=1,
        past=past,
        masked=masked,
        per_channel=not factored,
        factored=factored,
        dtype=dtype,
    )
    model = layout.model(choose=lambda *_: diagonal.by_element)
    onnx.checker.check_model(model, full_check=True)
    run = runtimes.on_onnxruntime(model)
    rng = np.random.default_rng(0)
    for batch, length in ((2, 1), (1, 7), (3, 65), (1, 300), (2, 0), (1, 1)):
        x = layout.inputs(rng, batch, length)
        got, want, terms = run(x)[:2], layout.reference(x)[:2], layout.magnitude(x)[:2]
        for found, expected, size, relative in zip(got, want, terms, (rounding, 0.0), strict=True):
            assert found.shape == expected.shape
            limit = 3e-6 * size + relative * np.abs(expected) + (2.0**-25 if relative else 1e-37)
            assert (np.abs(found - expected) <= limit).all()


@pytest.mark.parametrize("factored", [False, True])
def test_in_onnx_s_evaluator(factored: bool) -> None:
    spec = LinearAttentionSpec(1, HEADS, "gated")
    kind = {"per_channel": not factored, "factored": factored}
    layout = Layout(spec, 1, d_k=4, d_v=1, past=True, **kind)
    run = runtimes.on_reference(layout.model(choose=lambda *_: diagonal.by_element))
    x = layout.inputs(np.random.default_rng(1), 2, 9)
    for found, expected in zip(run(x)[:2], layout.reference(x)[:2], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
