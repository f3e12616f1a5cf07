"""Random maps against their theory: the mean, the variance, and claims that are wrong elsewhere.

A check draws a map N times and holds the mean of a quantity against its expectation. The allowed
distance is a quantile of the mean's distribution, by Cornish and Fisher's expansion with the
measured skewness and kurtosis, as features such as favor+'s are far from normal:

    quantile = z + (z^2 - 1) g / (6 sqrt N) + (z^3 - 3 z) k / (24 N) - (2 z^3 - 5 z) g^2 / (36 N)

with z that of 1e-6 / CHECKS on two sides, so that all the checks of this file together raise a
false alarm less than once in a million draws of their seeds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate

from linexport.errors import UsageError
from linexport.models import feature_maps
from linexport.models.feature_maps import FeatureMap
from linexport.models.feature_maps.base import UNBIASED

CHECKS = 1000
"""More comparisons than this file makes."""

Z = NormalDist().inv_cdf(1 - 1e-6 / CHECKS / 2)
DRAWS = 1200
WIDTH = 4

RANDOM = [k for k in feature_maps.kinds() if feature_maps.find_map(k).exactness == UNBIASED]


def quantile(sample: np.ndarray) -> float:
    """Standard errors that the mean of ``sample`` may be away from its expectation."""
    if sample.std() < 1e-12:  # no randomness: what varies is rounding
        return Z
    count = len(sample)
    standard = (sample - sample.mean()) / sample.std()
    skew, kurtosis = abs((standard**3).mean()), (standard**4).mean() - 3
    tail = (Z**2 - 1) * skew / (6 * math.sqrt(count))
    tail += (Z**3 - 3 * Z) * max(kurtosis, 0.0) / (24 * count)
    # The expansion is one: where its first term is not small beside z, it says nothing.
    assert tail < Z / 2, f"too few draws for a skewness of {skew:.2g}"
    return Z + tail


def distance(sample: np.ndarray, expected: float) -> float:
    """Of the mean from what is expected, as a share of what is allowed: below 1 is agreement."""
    error = sample.std() / math.sqrt(len(sample))
    rounding = 1e-6 * abs(expected) + 1e-12
    return float(abs(sample.mean() - expected) / (quantile(sample) * error + rounding))


def pairs(width: int = WIDTH) -> tuple[np.ndarray, np.ndarray]:
    """Rows of queries and keys: near, far, equal, orthogonal, opposite, zero."""
    random = np.random.default_rng(7)
    q, k = random.normal(size=(2, 7, width)) * 0.4
    k[2] = q[2]
    k[3] -= q[3] * (k[3] @ q[3]) / (q[3] @ q[3])
    k[4] = -q[4]
    k[5] = 0.0
    return q, k


def products(module: FeatureMap, q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """phi(q) . phi(k), row by row, in float64."""
    frozen = [p.double() if p.is_floating_point() else p for p in module.frozen()]
    phi_q = module.phi(torch.from_numpy(q), *frozen)
    phi_k = module.phi_key(torch.from_numpy(k), *frozen)
    return (phi_q * phi_k).sum(-1).numpy()


def draw(
    kind: str, options: dict[str, Any], q: np.ndarray, k: np.ndarray, count: int = DRAWS
) -> np.ndarray:
    """phi(q) . phi(k) of ``count`` maps, each with a seed of its own: (count, rows)."""
    made = (feature_maps.make(kind, q.shape[1], {**options, "seed": seed}) for seed in range(count))
    return np.stack([products(module, q, k) for module in made])


# The closed forms

CASES = [
    *((kind, {"orthogonal": False}) for kind in ("favor+", "favor+hyperbolic", "trigonometric")),
    ("favor+flat", {"orthogonal": False, "floor": 0.3, "sharpness": 0.6}),
    *(("random_monomials", {"degree": n}) for n in (1, 2, 3)),
    *(("tensor_sketch", {"degree": n}) for n in (1, 2, 3)),
    ("local", {"delta": 0.8, "tau": 0.5}),
    ("laplace", {"delta": 2.0}),
    ("favor+*local", {"delta": 0.8, "tau": 0.5}),
    ("favor+*laplace", {"delta": 3.0}),
]
ORTHOGONAL = [(kind, {**o, "orthogonal": True}) for kind, o in CASES if "orthogonal" in o]


def test_every_random_map_is_tested() -> None:
    assert {kind for kind, _ in CASES} == set(RANDOM)
    assert len(CASES + ORTHOGONAL) * 2 * len(pairs()[0]) + 50 < CHECKS


@pytest.mark.parametrize(("kind", "options"), CASES + ORTHOGONAL)
def test_unbiased_and_of_the_stated_variance(kind: str, options: dict[str, Any]) -> None:
    q, k = pairs()
    options = {"features": 32, **options}
    sample = draw(kind, options, q, k)
    module = feature_maps.make(kind, WIDTH, options)
    kernel, error = module.kernel_value(q, k), module.theoretical_error(q, k)
    assert error is not None
    for row in range(len(q)):
        assert distance(sample[:, row], kernel[row]) < 1, f"mean of pair {row}"
        if options.get("orthogonal"):
            continue  # the closed form is that of independent draws; see below
        squares = (sample[:, row] - kernel[row]) ** 2
        if module.error_is_bound:
            allowed = quantile(squares) * squares.std() / math.sqrt(len(squares))
            assert squares.mean() <= error[row] + allowed + 1e-12, f"error of pair {row}"
        else:
            assert distance(squares, error[row]) < 1, f"error of pair {row}"


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_the_error_falls_as_one_over_the_features(kind: str, options: dict[str, Any]) -> None:
    q, k = pairs()
    errors = [
        feature_maps.make(kind, WIDTH, {"features": m, **options}).theoretical_error(q, k)
        for m in ((33, 129) if kind == "favor+flat" else (32, 128))
    ]
    assert errors[0] is not None and errors[1] is not None
    np.testing.assert_allclose(errors[0], 4 * errors[1], rtol=1e-12)


@pytest.mark.parametrize("kind", ["favor+hyperbolic", "trigonometric"])
def test_orthogonal_projections_lower_the_error(kind: str) -> None:
    """One block of projections, at the same M as independent ones.

    Not favor+: for vectors short enough to be measured, nearly all its error is of first order in
    w, which no dependence between the directions changes.
    """
    q = np.full((1, 8), 0.3)
    squares = []
    for orthogonal in (True, False):
        options = {"features": 16, "orthogonal": orthogonal}
        squares.append((draw(kind, options, q, np.zeros((1, 8)), 1500)[:, 0] - 1) ** 2)
    better, worse = squares
    deviation = math.hypot(better.std(), worse.std()) / math.sqrt(len(better))
    assert better.mean() < worse.mean() - Z * deviation


def test_a_check_can_fail() -> None:
    """A kernel off by a fifth of its deviation, or a variance by half, is noticed."""
    q, k = pairs()
    module = feature_maps.make("laplace", WIDTH, {"features": 32, "delta": 2.0})
    sample = draw("laplace", {"features": 32, "delta": 2.0}, q, k)[:, 0]
    kernel, error = module.kernel_value(q, k)[0], module.theoretical_error(q, k)
    assert error is not None
    assert distance(sample, kernel + 0.2 * math.sqrt(error[0])) > 1
    assert distance((sample - kernel) ** 2, 1.6 * error[0]) > 1
    assert distance((sample - kernel) ** 2, 0.6 * error[0]) > 1


# Claims made elsewhere that are wrong, each shown to be on a case of its own


def test_wrong_the_variance_of_monomials_with_an_unsquared_kernel() -> None:
    """(d^n (x^2 . y^2)^n - (x.y)^n) / m: the subtracted term lacks its square.

    Of equal components every monomial is the same, so that there is no error at all.
    """
    for size, claim in ((2.0, (16 - 4) / 32), (0.5, (1 / 16 - 1 / 4) / 32)):
        x = np.full((1, WIDTH), math.sqrt(size / WIDTH))
        options = {"features": 32, "degree": 2}
        module = feature_maps.make("random_monomials", WIDTH, options)
        right = module.theoretical_error(x, x)
        assert right is not None and abs(right[0]) < 1e-12
        wrong = (WIDTH**2 * float((x**4).sum()) ** 2 - size**2) / 32
        assert wrong == pytest.approx(claim), "and a negative variance for a small kernel"
        squares = (draw("random_monomials", options, x, x, 50)[:, 0] - size**2) ** 2
        assert squares.max() < 1e-12


def test_wrong_one_bound_for_sketches_of_every_degree() -> None:
    """((x.y)^2n + |x|^2n |y|^2n) / m: at n = 2, d = 8, m = 32, |x| = 1 it says 0.0625, not 0.11."""
    x = np.random.default_rng(2).normal(size=(1, 8))
    x /= np.linalg.norm(x)
    sample = draw("tensor_sketch", {"features": 32, "degree": 2}, x, x, 3000)[:, 0]
    squares = (sample - 1) ** 2
    claim = (1 + 1) / 32
    allowed = quantile(squares) * squares.std() / math.sqrt(len(squares))
    assert squares.mean() - allowed > claim
    assert 0.09 < squares.mean() < 0.14
    right = feature_maps.make("tensor_sketch", 8, {"features": 32}).theoretical_error(x, x)
    assert right is not None and squares.mean() + allowed < right[0] == pytest.approx(11 / 32)


def test_the_error_of_a_count_sketch() -> None:
    """n = 1: equal components count twice in ((x.y)^2 + |x|^2 |y|^2) / m, which is a bound."""
    q, k = pairs()
    sample = draw("tensor_sketch", {"features": 32, "degree": 1}, q, k)
    both = ((q * k).sum(-1) ** 2 + (q**2).sum(-1) * (k**2).sum(-1)) / 32
    exact = both - 2 * (q**2 * k**2).sum(-1) / 32
    for row in range(len(q)):
        squares = (sample[:, row] - (q[row] * k[row]).sum()) ** 2
        assert distance(squares, exact[row]) < 1
    # A single component is sketched without error; the bound says 2 / m.
    one = np.eye(WIDTH)[:1]
    squares = (draw("tensor_sketch", {"features": 32, "degree": 1}, one, one, 50)[:, 0] - 1) ** 2
    assert squares.max() < 1e-12


def test_wrong_frequencies_of_the_kernels_own_variance() -> None:
    """w ~ N(0, sigma^2 I) for exp(-|q - k|^2 / (2 sigma^2)), whose density is N(0, I / sigma^2)."""
    sigma, count = 2.0, 20_000
    u = np.array([0.9, -0.4, 0.3])
    kernel = math.exp(-float(u @ u) / (2 * sigma**2))
    w = np.random.default_rng(0).standard_normal((count, 3))
    assert distance(np.cos(w @ u / sigma), kernel) < 1
    assert distance(np.cos(w @ u * sigma), kernel) > 1


def test_wrong_frequencies_of_softmax_on_unscaled_inputs() -> None:
    """exp(q.k/sqrt(D)) on raw q, k: w ~ N(0, I / sqrt(D)), not N(0, sqrt(D) I)."""
    D, count = 16, 50_000
    random = np.random.default_rng(1)
    q, k = 0.08 * random.normal(size=(2, D))
    w = random.standard_normal((count, D))
    kernel = math.exp(float(q @ k) / math.sqrt(D))
    for scale, agrees in ((D**-0.25, True), (D**0.25, False)):
        projected = scale * w
        norms = math.exp(float(q @ q + k @ k) * -0.5 / math.sqrt(D))
        estimates = np.exp(projected @ (q + k)) * norms
        assert (distance(estimates, kernel) < 1) == agrees
    # And so the map does: its projections act on x / D^(1/4).
    sample = draw("favor+", {"features": 64, "orthogonal": False}, q[None], k[None])[:, 0]
    assert distance(sample, kernel) < 1


def test_wrong_polynomial_features_without_the_square_root_of_two() -> None:
    """scikit-learn's, whose cross terms count once where the square of q . k has them twice."""
    from sklearn.preprocessing import PolynomialFeatures

    q, k = pairs()
    unscaled = PolynomialFeatures(2, include_bias=False)
    phi_q, phi_k = unscaled.fit_transform(q)[:, WIDTH:], unscaled.fit_transform(k)[:, WIDTH:]
    want = (q * k).sum(-1) ** 2
    assert np.abs((phi_q * phi_k).sum(-1) - want).max() > 0.05
    np.testing.assert_allclose(
        products(feature_maps.make("quadratic", WIDTH), q, k), want, rtol=1e-10, atol=1e-12
    )


def integral(f: Callable[[float], float], end: float) -> float:
    """Of an even function whose sign changes at multiples of pi, over [-end pi, end pi]."""
    pieces = (integrate.quad(f, n * math.pi, (n + 1) * math.pi)[0] for n in range(int(end)))
    return 2 * sum(pieces)


def test_wrong_a_density_from_the_transform_of_the_indicator() -> None:
    """|k^| of 1[|u| <= 1], 2 |sin w| / |w|, has no integral: each doubling adds as much again."""
    sizes = [integral(lambda w: 2 * abs(np.sinc(w / math.pi)), n) for n in (64, 128, 256, 512)]
    added = np.diff(sizes)
    np.testing.assert_allclose(added, 8 / math.pi * math.log(2), rtol=0.01)
    # Smoothed by N(0, tau^2), it has one.
    smooth = [
        integral(lambda w: 2 * abs(np.sinc(w / math.pi)) * math.exp(-((0.25 * w) ** 2) / 2), n)
        for n in (16, 32)
    ]
    assert smooth[0] == pytest.approx(smooth[1], rel=1e-9)


def test_wrong_features_with_the_root_of_the_transform_in_place_of_its_integral() -> None:
    """w from |k^| / int |k^|: the features need the factor int |k^|, not sqrt |k^(w)|.

    On k(u) = exp(-u^2 / 2), whose transform k^(w) = exp(-w^2 / 2) / sqrt(2 pi) integrates to 1.
    """
    w = np.random.default_rng(2).standard_normal(20_000)
    transform = np.exp(-(w**2) / 2) / math.sqrt(2 * math.pi)
    for u in (0.0, 0.7):
        kernel = math.exp(-(u**2) / 2)
        assert distance(1.0 * np.cos(w * u), kernel) < 1
        assert distance(transform * np.cos(w * u), kernel) > 1


# The constant feature


def attention_error(module: FeatureMap, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> float:
    """Of bidirectional attention from softmax's, relative."""
    weights = np.exp(q @ k.T / math.sqrt(q.shape[1]))
    want = weights @ v / weights.sum(1, keepdims=True)
    frozen = [p.double() for p in module.frozen()]
    scores = (module.phi(torch.from_numpy(q), *frozen).numpy()) @ (
        module.phi_key(torch.from_numpy(k), *frozen).numpy().T
    )
    got = scores @ v / scores.sum(1, keepdims=True)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("scale", [0.3, 0.5, 0.7, 1.0])
def test_a_fitted_sharpness_beats_favor_and_the_mean(scale: float) -> None:
    """At d = 64, over three draws; fitted to other samples of the same distribution."""
    random = np.random.default_rng(5)
    errors: dict[str, list[float]] = {"favor+": [], "favor+flat": [], "mean": []}
    for seed in range(3):
        q, k, other_q, other_k = scale * random.normal(size=(4, 512, 64))
        v = random.normal(size=(512, 64))
        for kind in ("favor+", "favor+flat"):
            module = feature_maps.make(kind, 64, {"features": 256, "seed": seed})
            if kind == "favor+flat":
                module.fit(other_q, other_k)  # type: ignore[operator]
            errors[kind].append(attention_error(module, q, k, v))
        mean = feature_maps.make("favor+flat", 64, {"features": 2, "floor": 1e12})
        errors["mean"].append(attention_error(mean, q, k, v))
    flat = np.mean(errors["favor+flat"])
    assert flat < 0.85 * np.mean(errors["favor+"])
    assert flat < 0.93 * np.mean(errors["mean"])


def test_sharpness_and_floor_are_positive() -> None:
    for name, value in itertools.product(("floor", "sharpness"), (0.0, -1.0)):
        with pytest.raises(UsageError, match=rf"'{name}' is .*; expected float > 0"):
            feature_maps.make("favor+flat", 8, {name: value})


@pytest.mark.parametrize("wrong", [np.ones((3, 7)), np.ones((0, 8)), np.full((3, 8), np.nan)])
def test_a_fit_refuses_samples_that_are_none(wrong: np.ndarray) -> None:
    module, good = feature_maps.make("favor+flat", 8), np.ones((3, 8))
    for name, given in (("queries", (wrong, good)), ("keys", (good, wrong))):
        with pytest.raises(UsageError, match=rf"{name} has shape .*; expected \(n, 8\)"):
            module.fit(*given)  # type: ignore[operator]
