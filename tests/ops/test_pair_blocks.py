"""Maps made of pairs, in blocks with tokens innermost: against the oracle in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto

from linexport.models import feature_maps
from linexport.models.feature_maps.quadratic import QuadraticOptions
from linexport.plugins.ops.linear_attention import LinearAttentionSpec, linear_attention
from linexport.plugins.ops.linear_attention.pair_blocks import SHORTEST
from tests.support import runtimes
from tests.support.layouts import mapped_model

WIDTHS = (1, 3, 16, 20, 40)
"""Widths of heads: less than one block of rows, one, one with a rest, and several."""
MAPS = {"taylor2": None, "quadratic": None, "quadratic with a constant": QuadraticOptions(c=0.5)}
HEADS, KV_HEADS, VALUE_WIDTH = 4, 2, 6


def made(name: str, width: int) -> Any:
    return feature_maps.find_map(name.split()[0])(width, MAPS[name])


def shapes(phi: Any, normalize: bool = True) -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {
        "query": ("B", "T", HEADS * phi.head_dim),
        "key": ("B", "T", KV_HEADS * phi.head_dim),
        "value": ("B", "T", KV_HEADS * VALUE_WIDTH),
        "past_state": ("B", KV_HEADS, phi.features, VALUE_WIDTH),
        "past_normalizer": ("B", KV_HEADS, phi.features),
        "key_mask": ("B", "T"),
    }
    if not normalize:
        del found["past_normalizer"]
    return found


def inputs(phi: Any, length: int) -> dict[str, np.ndarray]:
    """Keys of a past are features of keys, so that denominators stay positive."""
    rng = np.random.default_rng(length)
    sizes = {"B": 2, "T": length}
    x = {
        n: rng.normal(size=[sizes.get(d, d) for d in s]).astype(np.float32)
        for n, s in shapes(phi).items()
    }
    x["key_mask"] = x["key_mask"] > -0.5
    past = rng.normal(size=(2, 7, KV_HEADS * phi.head_dim))
    past = features(phi, past, KV_HEADS).reshape(2, 7, KV_HEADS, -1)
    x["past_normalizer"] = past.sum(1).astype(np.float32)
    values = rng.normal(size=(2, 7, KV_HEADS, VALUE_WIDTH))
    x["past_state"] = np.einsum("bthm,bthv->bhmv", past, values).astype(np.float32)
    return x


def features(phi: Any, packed: np.ndarray, heads: int) -> np.ndarray:
    """phi in float64 on every head."""
    frozen = [t.double() for t in phi.frozen()]
    split = torch.from_numpy(packed.astype(np.float64)).unflatten(-1, (heads, phi.head_dim))
    return np.asarray(phi.phi(split, *frozen).flatten(-2))


def oracle(spec: LinearAttentionSpec, phi: Any, x: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The three results in float64."""
    mapped = {
        "query": features(phi, x["query"], HEADS),
        "key": features(phi, x["key"], KV_HEADS),
    }
    return list(linear_attention(spec, **{**x, **mapped}))


def assert_close(got: list[np.ndarray], want: list[np.ndarray], tolerance: float) -> None:
    """Relative to the largest element of each result."""
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        assert np.abs(g - w).max() <= tolerance * np.abs(w).max()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", MAPS)
def test_equals_the_oracle(name: str, width: int, normalize: bool) -> None:
    spec = LinearAttentionSpec(HEADS, KV_HEADS, normalize=normalize, scale=0.5)
    phi = made(name, width)
    run = runtimes.on_onnxruntime(mapped_model(spec, phi, shapes(phi, spec.normalize)))
    for length in (0, 1, SHORTEST, SHORTEST + 1, 128, 300):
        x = inputs(phi, length)
        if not normalize:
            del x["past_normalizer"]
        results = slice(0 if length else 1, 3 if normalize else 2)
        assert_close(run(x)[results], oracle(spec, phi, x)[results], 3e-6)


def test_the_state_goes_on_in_either_form() -> None:
    """40 tokens in blocks, 3 in the short form, 57 in blocks: what 100 at once give."""
    spec, phi = LinearAttentionSpec(HEADS, KV_HEADS, normalize=True), made("taylor2", 20)
    run, x = (
        runtimes.on_onnxruntime(mapped_model(spec, phi, shapes(phi, spec.normalize))),
        inputs(made("taylor2", 20), 100),
    )
    want = oracle(spec, phi, x)
    outputs, states = [], [x["past_state"], x["past_normalizer"]]
    for cut in (slice(0, 40), slice(40, 43), slice(43, 100)):
        part = {n: v[:, cut] for n, v in x.items() if not n.startswith("past")}
        output, *states = run({**part, "past_state": states[0], "past_normalizer": states[1]})
        outputs.append(output)
    assert_close([np.concatenate(outputs, 1), *states], want, 3e-6)


def test_half_precision_is_computed_in_single() -> None:
    """Pairs of components leave float16's range; sums of them do not lose the output's digits."""
    spec, phi = LinearAttentionSpec(HEADS, KV_HEADS, normalize=True), made("taylor2", 16)
    x = inputs(phi, 70)
    for name in ("query", "key"):
        x[name] = x[name] * 300
    half = {n: v.astype(np.float16) if n in ("query", "key", "value") else v for n, v in x.items()}
    session = runtimes.session(mapped_model(spec, phi, shapes(phi), TensorProto.FLOAT16))
    got = [np.asarray(y, np.float64) for y in session.run(None, half)]
    assert_close(got, oracle(spec, phi, half), 2e-3)
