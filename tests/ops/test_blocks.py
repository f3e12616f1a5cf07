"""ONNX Runtime's kernel a block of tokens at a time, against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from linexport.plugins.ops.linear_attention import LinearAttentionSpec
from linexport.targets.lowering import kernels, token_blocks
from tests.support import runtimes
from tests.support.comparison import assert_close
from tests.support.layouts import Layout

BLOCK = 8
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5, 10 * BLOCK, 0)
RULES = ("linear", "gated", "delta", "gated_delta")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_blocks, "SMALLEST", BLOCK)
    monkeypatch.setattr(token_blocks, "CACHED", 1)


@pytest.mark.parametrize("lowering", [kernels.native_blocked, kernels.native_padded])
@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.usefixtures("small_blocks")
def test_equals_oracle_at_every_border(rule: str, past: bool, lowering: Any) -> None:
    normalize = "delta" not in rule
    spec = LinearAttentionSpec(4, 2, rule, normalize=normalize, scale=0.5, eps=1e-6)
    layout = Layout(spec, 1, past=past, masked=True, per_channel=rule == "gated")
    run = runtimes.on_onnxruntime(layout.model(choose=lambda *_: lowering))
    rng = np.random.default_rng(0)
    for length in LENGTHS:
        x = layout.inputs(rng, 2, length)
        results = (run(x), layout.reference(x), layout.magnitude(x))
        # Without normalize there is no normalizer to compare.
        assert_close(*(r if normalize else r[:2] for r in results), rtol=5e-6)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("rule", ["linear", "gated"])
def test_half_precision_keeps_sums_in_float32(rule: str, past: bool) -> None:
    spec = LinearAttentionSpec(2, 2, rule, normalize=True, scale=4.0, eps=1e-6)
    layout = Layout(spec, 2, past=past, dtype="float16")
    run = runtimes.on_onnxruntime(layout.model(choose=lambda *_: kernels.native_blocked))
    x = layout.inputs(np.random.default_rng(0), 2, 5 * BLOCK + 1)
    x["value"] *= 1000  # numerators pass 65504
    got, want = run(x), layout.reference(x)
    assert_close(got[:1], want[:1], layout.magnitude(x)[:1], rtol=1e-3)
    assert_close(got[1:], want[1:], layout.magnitude(x)[1:], rtol=1e-5)


def test_a_block_is_what_stays_in_cache() -> None:
    narrow, wide = (
        token_blocks.tokens_per_block(
            LinearAttentionSpec(8, 8), token_blocks.AttentionSizes(8, d, d)
        )
        for d in (64, 512)
    )
    assert (narrow, wide) == (256, 128)
    assert (
        token_blocks.tokens_per_block(
            LinearAttentionSpec(8, 8), token_blocks.AttentionSizes(8, 9999, 1)
        )
        == 128
    )
