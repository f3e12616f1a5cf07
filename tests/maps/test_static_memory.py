"""Fitted static memories: what they reach, beside the baselines, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans

from linexport.errors import UsageError
from linexport.models.static_memory import (
    Clusters,
    PseudoMemory,
    StaticMemory,
    fit_pseudo_keys,
    fit_svd,
    kmeans,
)

Data = tuple[np.ndarray, np.ndarray, np.ndarray]


def gaussian(seed: int, queries: int = 4000, keys: int = 200, d: int = 16) -> Data:
    random = np.random.default_rng(seed)
    return (
        random.normal(size=(queries, d)),
        random.normal(size=(keys, d)),
        random.normal(size=(keys, d)),
    )


def structured(seed: int, queries: int = 1000, groups: int = 24, d: int = 16) -> Data:
    """Keys in groups, values that follow the keys: what a memory of real tokens looks like."""
    random = np.random.default_rng(seed)
    centres = random.normal(size=(groups, d))
    keys = centres[random.integers(groups, size=200)] + 0.05 * random.normal(size=(200, d))
    return random.normal(size=(queries, d)), keys, keys @ random.normal(size=(d, d))


def attention(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """From the definition, one query after another."""
    rows = []
    for q in queries:
        weights = np.array([np.exp(q @ k) for k in keys])
        rows.append(sum(w * v for w, v in zip(weights, values, strict=True)) / weights.sum())
    return np.array(rows)


def relative(got: np.ndarray, true: np.ndarray) -> float:
    return float(np.sqrt(((got - true) ** 2).sum() / (true**2).sum()))


@pytest.mark.parametrize("seed", range(2))
def test_gaussian_keys_are_hard_but_better_than_both_baselines(seed: int) -> None:
    data = gaussian(seed)
    plain = fit_pseudo_keys(*data, 64).fit
    refined = fit_pseudo_keys(*data, 64, refine_steps=150).fit
    svd = fit_svd(*data, 64).fit
    assert plain.held_out_error < 0.85 * plain.baseline_error
    assert refined.held_out_error < 0.65 * refined.baseline_error
    assert refined.error <= plain.error
    assert svd.held_out_error > 0.9, "no better than nothing, on queries it was not fitted to"
    assert 0.95 < plain.baseline_error < 1.0


@pytest.mark.parametrize("seed", range(3))
def test_structured_keys_are_all_but_exact(seed: int) -> None:
    fit = fit_pseudo_keys(*structured(seed), 24).fit
    assert fit.held_out_error < 0.08 < 0.5 < fit.baseline_error


def test_the_errors_are_those_of_the_definition_on_queries_it_never_saw() -> None:
    queries, keys, values = structured(0, queries=200)
    unseen = structured(1, queries=50)[0]
    memory = fit_pseudo_keys(queries, keys, values, 16, held_out=unseen)
    true = attention(unseen, keys, values)
    got = attention(unseen @ np.eye(16), memory.keys, np.eye(16)) * np.exp(memory.bias)
    got = got / got.sum(1, keepdims=True) @ memory.values
    assert memory.fit.held_out_error == pytest.approx(relative(got, true), rel=1e-9)
    mean = np.broadcast_to(values.mean(0), true.shape)
    assert memory.fit.baseline_error == pytest.approx(relative(mean, true), rel=1e-9)
    own = relative(memory.attend(queries), attention(queries, keys, values))
    assert memory.fit.error == pytest.approx(own, rel=1e-9)


def test_a_quarter_is_held_out_and_does_not_change_the_fit() -> None:
    """What is held out is what differs when it is replaced and the fit stays the same."""
    queries, keys, values = structured(0, queries=200)
    first = fit_pseudo_keys(queries, keys, values, 16, seed=3)
    aside = np.random.default_rng(3).permutation(200)[:50]
    changed = queries.copy()
    changed[aside] = structured(5, queries=50)[0]
    second = fit_pseudo_keys(changed, keys, values, 16, seed=3)
    np.testing.assert_array_equal(first.values, second.values)
    assert first.fit.error == second.fit.error
    assert first.fit.held_out_error != second.fit.held_out_error


def test_least_squares_is_at_its_minimum() -> None:
    queries, keys, values = structured(2, queries=300)
    memory = fit_pseudo_keys(queries, keys, values, 12, ridge=0.0, held_out=queries)
    true = attention(queries, keys, values)
    scores = np.exp(queries @ memory.keys.T + memory.bias)
    weights = scores / scores.sum(1, keepdims=True)
    gradient = weights.T @ (weights @ memory.values - true)
    assert np.abs(gradient).max() < 1e-9 * np.abs(weights.T @ true).max()


def test_ridge_pulls_towards_the_mean_values_of_the_clusters() -> None:
    queries, keys, values = structured(2, queries=300)
    memory = fit_pseudo_keys(queries, keys, values, 12, ridge=1e9, held_out=queries)
    scores = np.exp(queries @ keys.T)
    paid = (scores / scores.sum(1, keepdims=True)).mean(0)
    clusterings = [kmeans(keys, 12), kmeans(keys, 12, weights=0.999 * paid + 0.001 / len(keys))]
    (clusters,) = (c for c in clusterings if np.allclose(c.centroids, memory.keys))
    np.testing.assert_allclose(memory.values, clusters.means(values), rtol=1e-6, atol=1e-8)


def test_the_same_seed_gives_the_same_bytes() -> None:
    fits = [fit_pseudo_keys(*structured(0), 24, refine_steps=3, seed=1) for _ in range(2)]
    for name in ("keys", "bias", "values"):
        assert getattr(fits[0], name).tobytes() == getattr(fits[1], name).tobytes()


# The published example of the SVD route


def published(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Queries, which are also the keys, and values, as the notebook draws them."""
    random = np.random.default_rng(seed)
    square = random.random((64, 64))
    q = np.concatenate([square @ square, np.ones((400 - 64, 64))])
    return q, random.random((400, 64))


def test_the_published_example_of_the_svd_route() -> None:
    """The notebook, unseeded, printed 3.2497e-05, the mean norm of the error of a query.

    That lies within what other draws give; and all draws are degenerate: every query attends to
    the same one or two keys, so that two singular values are all of A.
    """
    found = []
    for seed in range(8):
        q, v = published(seed)
        memory = fit_svd(q, q, v, 200, held_out=q)
        true_scores = q @ q.T
        A = np.exp(true_scores - true_scores.max(1, keepdims=True))
        A /= A.sum(1, keepdims=True)
        singular = np.linalg.svd(A, compute_uv=False)
        assert singular[2] < 1e-2 * singular[0]
        error = memory.attend(q, memory.row_sums) - A @ v
        found.append(np.linalg.norm(error, axis=1).mean())
        assert memory.fit.error < 0.01
    assert min(found) < 3.2497e-05 < max(found)


def test_pseudo_keys_are_nearer_on_the_published_example_than_the_svd_route() -> None:
    """Its attention has rank 1 to 3, at which any number of pseudo-keys is well posed."""
    nearer = []
    for seed in range(5):
        q, v = published(seed)
        training = np.concatenate([q, q])
        for count in (4, 16, 48):
            ours = fit_pseudo_keys(training, q, v, count, held_out=q).fit.held_out_error
            theirs = fit_svd(training, q, v, count, held_out=q).fit.held_out_error
            nearer.append(ours < theirs)
            assert count < 16 or ours < max(2e-6, 1e-2 * theirs)
    assert np.mean(nearer) > 0.9


@pytest.mark.parametrize("ridge", [0.0, 1e-6])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.05])
def test_more_pseudo_keys_than_clusters_are_no_worse(spread: float, ridge: float) -> None:
    """With ``spread`` 0 there are fewer distinct keys than pseudo-keys, and the fit is exact."""
    random = np.random.default_rng(0)
    centres = 4 * random.normal(size=(40, 16))
    queries, keys = (
        centres[random.integers(40, size=n)] + spread * random.normal(size=(n, 16))
        for n in (2000, 400)
    )
    values = random.normal(size=(400, 16))
    few, enough, more = (
        fit_pseudo_keys(queries, keys, values, n, ridge=ridge).fit.held_out_error
        for n in (30, 40, 64)
    )
    assert few > 0.1
    assert more < enough < 0.01 or max(more, enough) < 1e-12


def test_queries_of_rank_1_are_fitted_where_they_are() -> None:
    _, keys, values = structured(0)
    queries = np.random.default_rng(0).normal(size=(900, 1)) * np.ones(16)
    assert fit_pseudo_keys(queries, keys, values, 24).fit.held_out_error < 0.01
    assert np.isfinite(fit_svd(queries, keys, values, 24).fit.held_out_error)


def test_the_svd_route_fails_where_attention_is_not_degenerate() -> None:
    queries, keys, values = gaussian(0, queries=800)
    fit = fit_svd(queries, keys, values, 64).fit
    assert fit.error > 0.85
    scaled = fit_svd(queries, keys, values, 64, scale=0.25).fit
    assert scaled.held_out_error > scaled.baseline_error


# k-means


@pytest.mark.parametrize("seed", range(3))
def test_kmeans_is_as_tight_as_scikit_learns(seed: int) -> None:
    rows = structured(seed)[1]
    ours = min(kmeans(rows, 24, seed=s).inertia for s in range(3))
    theirs = KMeans(24, n_init=3, random_state=seed).fit(rows).inertia_
    assert ours < 1.3 * theirs


def test_kmeans_labels_the_nearest_and_leaves_no_cluster_empty() -> None:
    rows = np.concatenate([np.zeros((50, 2)), np.array([[9.0, 0.0], [9.1, 0.0], [0.0, 7.0]])])
    found = kmeans(rows, 4)
    assert sorted(found.sizes) == [1, 1, 1, 50]
    assert found.inertia == pytest.approx(0.0, abs=1e-20)
    rows = gaussian(0)[1]
    found = kmeans(rows, 30)
    distances = np.linalg.norm(rows[:, None] - found.centroids, axis=2)
    np.testing.assert_array_equal(distances.argmin(1), found.labels)
    np.testing.assert_allclose(found.means(rows), found.centroids, rtol=1e-12)


def test_kmeans_splits_equal_rows_where_fewer_are_distinct() -> None:
    rows = np.repeat(gaussian(0)[1][:10], 5, axis=0)
    found = kmeans(rows, 24)
    assert found.inertia < 1e-25 and found.sizes.min() >= 1 and found.sizes.sum() == 50
    with pytest.raises(UsageError, match="51 clusters of 50 rows"):
        kmeans(rows, 51)


def test_kmeans_places_centroids_by_weight() -> None:
    """Weights of whole numbers are repeated rows."""
    rows = gaussian(0)[1][:60]
    times = np.random.default_rng(1).integers(1, 5, size=60)
    weighted = min((kmeans(rows, 8, s, times.astype(float)) for s in range(5)), key=_inertia)
    repeated = min((kmeans(np.repeat(rows, times, axis=0), 8, s) for s in range(5)), key=_inertia)
    assert weighted.inertia == pytest.approx(repeated.inertia, rel=0.05)
    for j, centroid in enumerate(weighted.centroids):
        own = weighted.labels == j
        np.testing.assert_allclose(centroid, np.average(rows[own], axis=0, weights=times[own]))


def _inertia(found: Clusters) -> float:
    return found.inertia


# The layer


def test_the_layer_is_the_fits_head_by_head() -> None:
    heads = [fit_pseudo_keys(*structured(s), 20, scale=0.5, seed=s) for s in range(3)]
    layer = StaticMemory(heads)
    q = np.random.default_rng(0).normal(size=(2, 7, 3 * 16))
    got = layer(torch.from_numpy(q).float()).numpy()
    for h, memory in enumerate(heads):
        part = slice(16 * h, 16 * (h + 1))
        want = memory.attend(q[..., part].reshape(-1, 16)).reshape(2, 7, 16)
        np.testing.assert_allclose(got[..., part], want, rtol=1e-5, atol=1e-5)
    assert sorted(layer.state_dict()) == ["bias", "keys", "values"]


def test_a_layer_of_unlike_heads_is_refused() -> None:
    with pytest.raises(UsageError, match=r"heads of one size.*\(20, 16\).*\(24, 16\)"):
        StaticMemory([fit_pseudo_keys(*structured(0), n) for n in (20, 24)])
    with pytest.raises(UsageError, match="found none"):
        StaticMemory([])


# Refusals

Fitter = Callable[..., Any]


@pytest.mark.parametrize("fit", [fit_pseudo_keys, fit_svd])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": np.zeros((900, 16))}, "All sample queries are zero.*Record queries"),
        ({"queries": np.ones((30, 16))}, "30 sample queries, of which 8 are held out.*24 pseudo"),
        ({"count": 200}, "200 pseudo-keys for 200 keys save nothing.*fewer than 200"),
        ({"count": 0}, "0 pseudo-keys; expected at least 1"),
        ({"queries": np.ones((900, 15))}, r"queries \(900, 15\), keys \(200, 16\).*belong"),
        ({"values": np.ones((199, 16))}, r"values \(199, 16\) do not belong together"),
        ({"values": np.ones(200)}, r"values has shape \(200,\); expected"),
        ({"queries": np.ones((0, 16))}, r"queries has shape \(0, 16\)"),
        ({"keys": np.full((200, 16), np.nan)}, "keys has NaN or infinite entries"),
        ({"scale": 0.0}, "scale is 0.0; expected a positive number"),
        ({"scale": float("nan")}, "scale is nan"),
    ],
)
def test_what_cannot_be_fitted_is_refused(
    fit: Fitter, change: dict[str, Any], message: str
) -> None:
    queries, keys, values = structured(0)
    arguments = {"queries": queries, "keys": keys, "values": values, "count": 24}
    with pytest.raises(UsageError, match=message):
        fit(**{**arguments, **change})


@pytest.mark.parametrize("option", ["ridge", "refine_steps"])
def test_negative_options_are_refused(option: str) -> None:
    with pytest.raises(UsageError, match="cannot be negative"):
        fit_pseudo_keys(*structured(0), 24, **{option: -1})


def test_queries_held_out_by_the_caller_are_checked_too() -> None:
    with pytest.raises(UsageError, match="held_out has NaN"):
        fit_pseudo_keys(*structured(0), 24, held_out=np.full((3, 16), np.inf))


def test_a_fit_says_what_it_is() -> None:
    memory = fit_pseudo_keys(*structured(0), 24)
    assert isinstance(memory, PseudoMemory)
    assert memory.keys.shape == (24, 16) and memory.bias.shape == (24,)
