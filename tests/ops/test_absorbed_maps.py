"""LinearAttention that applies a feature map itself: the oracle on features in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from linexport.models import feature_maps
from linexport.plugins.ops import feature_map
from linexport.plugins.ops.linear_attention import OP, LinearAttentionSpec, linear_attention
from linexport.targets.lowering import kernels, token_blocks
from tests.support import runtimes
from tests.support.comparison import assert_close
from tests.support.layouts import mapped_model

KINDS = [k for k in feature_maps.kinds() if not feature_map.formulas(k).over_time]
HEADS, KV_HEADS, WIDTH, VALUE_WIDTH = 4, 2, 8, 6
SPECS = {
    "linear": LinearAttentionSpec(HEADS, KV_HEADS, scale=0.5, chunk_size=8),
    "normalised": LinearAttentionSpec(HEADS, KV_HEADS, normalize=True, eps=0.25, chunk_size=8),
    "gated": LinearAttentionSpec(HEADS, KV_HEADS, "gated", chunk_size=8),
}


def shapes(spec: LinearAttentionSpec) -> dict[str, tuple[Any, ...]]:
    """Of the inputs of a node, its length dynamic."""
    found: dict[str, tuple[Any, ...]] = {
        "query": ("B", "T", HEADS * WIDTH),
        "key": ("B", "T", KV_HEADS * WIDTH),
        "value": ("B", "T", KV_HEADS * VALUE_WIDTH),
        "decay": ("B", "T", KV_HEADS),
        "key_mask": ("B", "T"),
    }
    if not spec.has_decay:
        del found["decay"]
    return found


def inputs(spec: LinearAttentionSpec, length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(length)
    sizes = {"query": HEADS * WIDTH, "key": KV_HEADS * WIDTH, "value": KV_HEADS * VALUE_WIDTH}
    x = {n: rng.normal(size=(2, length, w)).astype(np.float32) for n, w in sizes.items()}
    if spec.has_decay:
        x["decay"] = -np.abs(rng.normal(size=(2, length, KV_HEADS))).astype(np.float32)
    x["key_mask"] = rng.random((2, length)) > 0.3
    x["key_mask"][:, :1] = True
    return x


def features(phi: Any, side: str, packed: np.ndarray, heads: int) -> np.ndarray:
    """phi in float64 on every head."""
    frozen = [t.double() if t.is_floating_point() else t for t in phi.frozen()]
    formula = phi.phi if side == "query" else phi.phi_key
    split = torch.from_numpy(packed.astype(np.float64)).unflatten(-1, (heads, WIDTH))
    return np.asarray(formula(split, *frozen).flatten(-2))


def lost(phi: Any, side: str, packed: np.ndarray, heads: int) -> float:
    """Return the float32 error of the features in PyTorch, relative to the largest.

    Waves of steep frequencies lose more than sums do.
    """
    exact = features(phi, side, packed, heads)
    single = phi(torch.from_numpy(packed), heads, side).numpy()
    return float(np.abs(single - exact).max() / np.abs(exact).max())


LOWERINGS = {"portable": OP.portable, "kernel": kernels.native_blocked}


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_oracle_on_features(
    kind: str, name: str, lowering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_blocks, "SMALLEST", 8)
    monkeypatch.setattr(token_blocks, "CACHED", 1)
    spec, phi = SPECS[name], feature_maps.find_map(kind)(WIDTH)
    choice = {"choose": lambda *_: LOWERINGS[lowering]}
    run = runtimes.on_onnxruntime(mapped_model(spec, phi, shapes(spec), **choice))
    for length in (1, 7, 8, 9, 30):
        x = inputs(spec, length)
        mapped = {
            "query": features(phi, "query", x["query"], HEADS),
            "key": features(phi, "key", x["key"], KV_HEADS),
        }
        want = linear_attention(spec, **{**x, **mapped})
        results = (run(x), want, magnitude(spec, {**x, **mapped}, want[0]))
        # An element may hold features below the largest: 8 times what that one loses.
        # Relative to the largest feature, where a result may be made of smaller ones: hence the 8.
        rounding = lost(phi, "query", x["query"], HEADS) + lost(phi, "key", x["key"], KV_HEADS)
        # Without normalize the kernel keeps no normalizer to compare.
        assert_close(*(r if spec.normalize else r[:2] for r in results), rtol=5e-6 + 8 * rounding)


def magnitude(
    spec: LinearAttentionSpec, x: dict[str, np.ndarray], output: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Sums of absolute values of the terms; of a ratio, by the rule for errors of a quotient.

    A feature is rounded relative to the largest of its token.
    """
    terms = {**x, "value": np.abs(x["value"])}
    for name, heads in (("query", HEADS), ("key", KV_HEADS)):
        split = np.abs(x[name]).reshape(*x[name].shape[:2], heads, -1)
        largest = np.broadcast_to(split.max(-1, keepdims=True), split.shape)
        terms[name] = largest.reshape(x[name].shape)
    plain = replace(spec, normalize=False)
    numerator, *states = linear_attention(plain, **terms)
    if not spec.normalize:
        return numerator, *states
    ones = np.ones_like(x["value"])
    below = linear_attention(plain, **{**x, "value": ones})[0] + spec.eps
    uncertain = linear_attention(plain, **{**terms, "value": ones})[0] + spec.eps
    return (numerator + np.abs(output) * uncertain) / np.abs(below), *states
