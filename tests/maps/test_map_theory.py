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

import mpmath
import numpy as np
import pytest
import torch
from scipy import integrate

from linexport.errors import UsageError
from linexport.models import feature_maps
from linexport.models.feature_maps import FeatureMap, orthogonal, tensor_sketch
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
    ("gaussian", {"orthogonal": False, "bandwidth": 0.9}),
    ("favor+*gaussian", {"orthogonal": False, "bandwidth": 2.0}),
    ("rfa", {"orthogonal": False, "bandwidth": 0.8}),
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
    if options.get("orthogonal"):  # Closer to zero: products of several projections have tails.
        q, k = q / 2, k / 2
    options = {"features": 32, **options}
    sample = draw(kind, options, q, k)
    module = feature_maps.make(kind, WIDTH, options)
    kernel, error = module.kernel_value(q, k), module.theoretical_error(q, k)
    assert error is not None
    for row in range(len(q)):
        assert distance(sample[:, row], kernel[row]) < 1, f"mean of pair {row}"
        squares = (sample[:, row] - kernel[row]) ** 2
        assert distance(squares, error[row]) < 1, f"error of pair {row}"


@pytest.mark.parametrize("width", [2, 3, 8])
def test_two_orthogonal_projections_have_the_stated_covariance(width: int) -> None:
    """Exponentials and cosines of one block's columns, against 1F1 and against draws."""
    random = np.random.default_rng(3)
    z = random.normal(size=width)
    z *= 0.8 / np.linalg.norm(z)
    u, v = random.standard_normal((2, 60_000, width))
    v -= u * ((u * v).sum(1) / (u * u).sum(1))[:, None]
    chi = np.sqrt(random.chisquare(width, size=(2, len(u))))
    one, two = (r * (x @ z) / np.linalg.norm(x, axis=1) for r, x in zip(chi, (u, v), strict=True))
    for function, sign in ((np.exp, 1), (np.cos, -1)):
        x = sign * float(z @ z) / 2
        exact = float(mpmath.hyp1f1(width, mpmath.mpf(width) / 2, x))
        assert distance(function(one) * function(two), exact) < 1
        stated = (exact - math.exp(2 * x)) * math.exp(-2 * max(x, 0))
        found = orthogonal.covariance(np.array([x]), width)[0]
        assert found == pytest.approx(stated, abs=1e-14)


@pytest.mark.parametrize("width", [2, 5, 64])
@pytest.mark.parametrize("x", [-900.0, -30.0, -0.01, 0.0, 2.0, 300.0])
def test_the_covariance_of_projections_of_any_size(width: int, x: float) -> None:
    exact = mpmath.hyp1f1(width, mpmath.mpf(width) / 2, x) - mpmath.exp(2 * x)
    want = float(exact * mpmath.exp(-2 * max(x, 0)))
    assert orthogonal.covariance(np.array([x]), width)[0] == pytest.approx(want, abs=1e-13)


@pytest.mark.parametrize(("degree", "features"), [(1, 2), (1, 4), (2, 2), (2, 4), (3, 2)])
def test_the_variance_of_a_sketch_over_all_hashes(degree: int, features: int) -> None:
    """Over every choice of places and signs for two components, so that nothing is left to chance.

    Circular convolution by its definition, not by transforms.
    """
    q, k = np.array([0.7, -1.3]), np.array([0.4, 0.9])
    found = []
    one = list(itertools.product(itertools.product(range(features), [-1, 1]), repeat=2))
    for hashes in itertools.product(one, repeat=degree):
        sketches = []
        for x in (q, k):
            total = np.zeros(features)
            for parts in itertools.product(range(2), repeat=degree):
                place = sum(hashes[t][i][0] for t, i in enumerate(parts)) % features
                total[place] += math.prod(hashes[t][i][1] * x[i] for t, i in enumerate(parts))
            sketches.append(total)
        found.append(float(sketches[0] @ sketches[1]))
    module = feature_maps.make("tensor_sketch", 2, {"features": features, "degree": degree})
    kernel = float(q @ k) ** degree
    assert np.mean(found) == pytest.approx(kernel, abs=1e-12)
    assert np.mean((np.array(found) - kernel) ** 2) == pytest.approx(
        module.theoretical_error(q[None], k[None])[0], rel=1e-12
    )


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_the_error_falls_as_one_over_the_features(kind: str, options: dict[str, Any]) -> None:
    q, k = pairs()
    errors = [
        feature_maps.make(kind, WIDTH, {"features": m, **options}).theoretical_error(q, k)
        for m in ((33, 129) if kind == "favor+flat" else (32, 128))
    ]
    assert errors[0] is not None and errors[1] is not None
    # A sketch has a term in 1/M^2 as well.
    rtol = 0.05 if kind == "tensor_sketch" and options["degree"] > 1 else 1e-12
    np.testing.assert_allclose(errors[0], 4 * errors[1], rtol=rtol)


@pytest.mark.parametrize("kind", ["favor+hyperbolic", "trigonometric"])
def test_orthogonal_projections_lower_the_error(kind: str) -> None:
    """One block of projections, at the same M as independent ones.

    Not favor+: for vectors short enough to be measured, nearly all its error is of first order in
    w, which no dependence between the directions changes.
    """
    q = np.full((1, 8), 0.3)
    squares = []
    for in_blocks in (True, False):
        options = {"features": 16, "orthogonal": in_blocks}
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
    assert right is not None and abs(squares.mean() - right[0]) < allowed
    assert right[0] < 0.4 * 11 / 32, "the general bound, (2 + 3^n) / M"


def test_a_sketch_of_degree_five_needs_a_ninth_of_what_the_bound_asks_for() -> None:
    """22,599 by (2 + 3^n) |x|^2n |y|^2n, and 2,459 by the variance, at a cosine of 0.883."""
    cosine, target = 0.8835, (2 + 3**5) / 22_599
    first, second = tensor_sketch.variance(
        np.array([cosine**2]), np.array([1.0]), np.array([1e-4]), 5
    )
    needed = float(np.roots([target, -first[0], -second[0]]).max())
    assert needed == pytest.approx(2459, rel=0.01)


def test_the_variance_of_a_sketch_of_many_small_components() -> None:
    width, features = 4000, 10_000
    x = np.full((1, width), width**-0.5)
    y = x * np.where(np.arange(width) % 2, 1, -1)
    for degree, bound in ((2, 11), (3, 29), (4, 83)):
        with torch.device("meta"):
            options = {"features": features, "degree": degree}
            module = feature_maps.make("tensor_sketch", width, options)
        equal, across = (module.theoretical_error(x, k) * features for k in (x, y))
        assert equal == pytest.approx(2 ** (degree + 1) - 2, rel=0.01)
        assert across == pytest.approx(1, rel=0.01)
        assert bound == 2 + 3**degree


def test_the_error_of_a_count_sketch() -> None:
    """n = 1: equal components count twice in ((x.y)^2 + |x|^2 |y|^2) / m, which is a bound."""
    q, k = pairs()
    module = feature_maps.make("tensor_sketch", WIDTH, {"features": 32, "degree": 1})
    both = ((q * k).sum(-1) ** 2 + (q**2).sum(-1) * (k**2).sum(-1)) / 32
    exact = both - 2 * (q**2 * k**2).sum(-1) / 32
    np.testing.assert_allclose(module.theoretical_error(q, k), exact, atol=1e-15)
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
        with pytest.raises(UsageError, match=rf"'{name}' is .*; expected float >"):
            feature_maps.make("favor+flat", 8, {name: value})


@pytest.mark.parametrize("wrong", [np.ones((3, 7)), np.ones((0, 8)), np.full((3, 8), np.nan)])
def test_a_fit_refuses_samples_that_are_none(wrong: np.ndarray) -> None:
    module, good = feature_maps.make("favor+flat", 8), np.ones((3, 8))
    for name, given in (("queries", (wrong, good)), ("keys", (good, wrong))):
        with pytest.raises(UsageError, match=rf"{name} has shape .*; expected \(n, 8\)"):
            module.fit(*given)  # type: ignore[operator]
