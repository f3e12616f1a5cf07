"""Statements on kernel attention that are often made and do not hold; see docs/math.md."""

from __future__ import annotations

import math

import numpy as np
import pytest

from linexport.models import feature_maps
from linexport.plugins.ops.linear_attention import LinearAttentionSpec, linear_attention


def softmax_kernel(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    return np.exp(queries @ keys.T / math.sqrt(queries.shape[1]))


def test_wrong_fewer_features_than_channels_are_enough() -> None:
    """No map with M features is nearer than the best matrix of rank M, which sees the data."""
    d = 64
    random = np.random.default_rng(0)
    kernel = softmax_kernel(*random.normal(size=(2, 1024, d)))
    singular = np.linalg.svd(kernel, compute_uv=False)
    size = np.linalg.norm(singular)
    best = {M: np.linalg.norm(singular[M:]) / size for M in (d // 8, d // 2, d, 4 * d)}
    # One feature, the same for all, gives the mean.
    mean = np.linalg.norm(singular[1:]) / size
    assert best[d // 8] > 0.85 * mean > 0.5
    assert best[d // 2] > 0.6 * mean
    assert best[4 * d] < 0.5 * mean
    for kind in ("identity", "elu1", "taylor2", "quadratic"):
        assert feature_maps.make(kind, d).features >= d


@pytest.mark.parametrize("length", [16, 256, 4096])
def test_wrong_the_answer_without_a_denominator(length: int) -> None:
    """The numerator alone grows with the number of keys, and its ratio to softmax with it."""
    random = np.random.default_rng(length)
    q, k, v = random.normal(size=(3, length, 8))
    k[:], v[:] = k - k.mean(0), v + 1
    weights = softmax_kernel(q[:32], k)
    right = weights / weights.sum(1, keepdims=True) @ v
    ratio = np.linalg.norm(weights @ v) / np.linalg.norm(right)
    # A key adds E exp(q . k / sqrt d), which is above 1.
    assert ratio > length


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda t: np.maximum(t, 0), id="relu"),
        pytest.param(lambda t: np.where(t > 0, t + 1, np.exp(np.minimum(t, 0))), id="elu1"),
    ],
)
def test_wrong_functions_of_the_score_as_kernels(function) -> None:
    """A kernel phi(x) . phi(y) has no negative eigenvalue; and a finite phi a finite rank."""
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 3))
    values = np.linalg.eigvalsh(function(x @ x.T))
    assert values.min() < -1e-3 * values.max()
    # Maps that differ for queries and keys are none either: the rank grows with the tokens.
    for count in (50, 100, 200):
        scores = function(random.normal(size=(count, 3)) @ random.normal(size=(3, count)))
        singular = np.linalg.svd(scores, compute_uv=False)
        assert (singular > 1e-9 * singular[0]).mean() > 0.9
    # The kernel of relu or elu1 applied to queries and keys has rank d, and no such eigenvalue.
    y = function(x)
    separate = np.linalg.eigvalsh(y @ y.T)
    assert separate.min() > -1e-12 * separate.max()
    assert (separate > 1e-9 * separate.max()).sum() == 3


def test_wrong_a_recurrence_is_sequential() -> None:
    """Steps S -> a S + U compose to one of their kind, so that halves may be joined in any order.

    A tree takes log2 T levels, each of which is parallel.
    """
    random = np.random.default_rng(0)
    T, d, d_v = 100, 4, 5
    k, v, q = random.normal(size=(T, d)), random.normal(size=(T, d_v)), random.normal(size=(T, d))
    decay = random.uniform(0.8, 1.0, size=T)
    state, expected = np.zeros((d, d_v)), []
    for t in range(T):
        state = decay[t] * state + np.outer(k[t], v[t])
        expected.append(q[t] @ state)
    kept, added = decay.copy(), k[:, :, None] * v[:, None, :]
    levels, reach = 0, 1
    while reach < T:
        added[reach:] = added[reach:] + kept[reach:, None, None] * added[:-reach]
        kept[reach:] = kept[reach:] * kept[:-reach]
        levels, reach = levels + 1, 2 * reach
    got = np.einsum("td,tde->te", q, added)
    np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-12)
    assert levels == math.ceil(math.log2(T))
    spec = LinearAttentionSpec(1, 1, update_rule="gated", scale=1.0)
    inputs = {n: x[None] for n, x in (("query", q), ("key", k), ("value", v))}
    oracle = linear_attention(spec, **inputs, decay=np.log(decay)[None, :, None])[0]
    np.testing.assert_allclose(got, oracle[0], rtol=1e-10, atol=1e-12)


def test_wrong_one_over_the_square_of_the_draws() -> None:
    """The mean of m products has 1 / m, and so has its variance; 1 / m^2 is of a sum of m."""
    m, d, draws = 16, 4, 4000
    random = np.random.default_rng(0)
    q, k = 0.5 * random.normal(size=(2, d))
    w = random.normal(size=(draws, m, d))
    products = np.exp(w @ (q + k) - (q @ q + k @ k) / 2)
    kernel, one = math.exp(q @ k), (math.exp((q + k) @ (q + k)) - 1) * math.exp(2 * q @ k)
    estimates = products.sum(1) / m
    assert estimates.mean() == pytest.approx(kernel, rel=0.02)
    assert estimates.var() == pytest.approx(one / m, rel=0.3)
    assert (products.sum(1) / m**2).mean() == pytest.approx(kernel / m, rel=0.02)
    assert estimates.var() > 5 * one / m**2
