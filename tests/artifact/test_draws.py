"""Tokens of large vocabularies are drawn as float64 draws them, in any distribution."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linexport.artifact.text import draws
from linexport.artifact.text.sampling import EXACT, Sampling

ROUNDING = 1e-5
"""Of a sum of float32 weights, in a probability."""


def logits_of(kind: str, size: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(size)
    if kind == "peaked":
        x[rng.integers(size)] = 14.0
    factor = {"flat": 0.01, "trained": 3.0, "peaked": 1.0, "equal": 0.0, "coarse": 2.0}[kind]
    x = np.round(x * factor) if kind == "coarse" else x * factor
    x[rng.integers(size, size=size // 50)] = -np.inf
    return x.astype(np.float32)


def kept_probabilities(logits: np.ndarray, how: Sampling) -> np.ndarray:
    """The definition in float64, by sorting the whole vocabulary."""
    x = logits.astype(np.float64) / how.temperature
    order = np.argsort(-x, kind="stable")
    if how.top_k:
        x[order[how.top_k :]] = -np.inf
    p = np.exp(x - x.max())
    p /= p.sum()
    if how.top_p < 1:
        count = 1 + np.searchsorted(np.cumsum(p[order]), how.top_p)
        p[order[count:]] = 0
    p[p < how.min_p * p.max()] = 0
    return np.asarray(p / p.sum())


@given(
    st.lists(st.integers(-9, 9), min_size=1, max_size=30),
    st.integers(1, 400),
    st.integers(1, 12_000),
)
@settings(max_examples=60)
def test_the_largest_are_those_of_a_stable_sort(
    values: list[int], repeats: int, count: int
) -> None:
    logits = np.tile(np.array(values, np.float32), repeats)
    count = min(count, len(logits))
    expected = np.sort(np.argsort(-logits, kind="stable")[:count])
    np.testing.assert_array_equal(draws.largest(logits, count), expected)


@pytest.mark.parametrize("kind", ["flat", "trained", "peaked", "equal", "coarse"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"top_k": 20, "top_p": 0.8},
        {"top_k": 6000, "top_p": 0.95, "min_p": 0.01},
        {"top_p": 0.3},
        {"top_p": 0.8},
        {"top_p": 0.999, "min_p": 0.001},
        {"min_p": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [EXACT + 1, 50_021])
def test_a_draw_is_that_of_float64_up_to_the_rounding_of_a_boundary(
    kind: str, how: dict[str, float], size: int
) -> None:
    """A token owns the interval of [0, 1) that its probability takes, in the order of tokens."""
    sampling = Sampling(temperature=0.7, **how)  # type: ignore[arg-type]
    logits = logits_of(kind, size)
    p = kept_probabilities(logits, sampling)
    ends = np.cumsum(p)
    # The sum that ends a nucleus may be rounded across its last token, which is the least of all.
    slack = ROUNDING + p[p > 0].min()
    for uniform in (0.0, 0.999999, *np.random.default_rng(1).random(60)):
        token = sampling.drawn(logits, float(uniform))
        before = ends[token] - p[token]
        assert before - slack <= uniform <= ends[token] + slack


@pytest.mark.parametrize("how", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.1}], ids=str)
def test_small_vocabularies_draw_what_numpy_chooses(how: dict[str, float]) -> None:
    logits, sampling = logits_of("trained", 200), Sampling(0.9, seed=3, **how)  # type: ignore[arg-type]
    random, choose = np.random.default_rng(3), sampling.chooser()
    for _ in range(50):
        expected = random.choice(len(logits), p=kept_probabilities(logits, sampling))
        assert choose(logits) == expected


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"top_k": 20, "top_p": 0.8}, {"top_p": 0.9}, {}], ids=str)
def test_draws_of_a_real_vocabulary_follow_their_probabilities(how: dict[str, float]) -> None:
    """Chi-squared over 200,000 draws of 248,320 tokens: fails rightly once in a million seeds."""
    sampling = Sampling(0.7, seed=11, **how)  # type: ignore[arg-type]
    logits, count = logits_of("trained", 248_320), 200_000
    p = kept_probabilities(logits, sampling)
    groups = np.minimum((np.cumsum(p) * 100).astype(int), 99)
    expected = count * np.bincount(groups, p, minlength=100)
    choose = sampling.chooser()
    found = np.bincount(groups[[choose(logits) for _ in range(count)]], minlength=100)
    possible = expected > 5
    assert not found[expected == 0].any()
    statistic = ((found - expected)[possible] ** 2 / expected[possible]).sum()
    degrees = possible.sum() - 1
    # The quantile of 1 - 1e-6 by Wilson and Hilferty's cube root.
    limit = degrees * (1 - 2 / (9 * degrees) + 4.7534 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert statistic < limit
