"""Maps of nearness: the mask they reproduce, what it costs with d, and what they refuse."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
import torch

from linexport.errors import UsageError
from linexport.maps.accuracy import judge, reference
from linexport.maps.attention_samples import random_samples
from linexport.models import feature_maps
from linexport.models.feature_maps.l1_ball import smoothed_indicator, uniform_in_ball, volume
from linexport.models.feature_maps.local import Local

Z = NormalDist().inv_cdf(1 - 1e-6 / 100)
"""Quantile of one check: all of this file raise a false alarm less than once in 10^6."""


def normal(x: float) -> float:
    return NormalDist().cdf(x)


# The kernel, which the tests of the map itself rely on


def test_the_smoothed_ball_in_one_dimension_is_a_difference_of_normals() -> None:
    u = np.linspace(-2.5, 2.5, 21)
    want = [normal((1.3 - x) / 0.4) - normal((-1.3 - x) / 0.4) for x in u]
    np.testing.assert_allclose(smoothed_indicator(u[:, None], 1.3, 0.4), want, atol=1e-12)


def test_the_smoothed_ball_in_two_dimensions_is_a_product_in_turned_axes() -> None:
    """|u1| + |u2| = max(|u1 + u2|, |u1 - u2|), and the two are independent normals."""
    u = np.random.default_rng(0).normal(size=(30, 2))
    want = []
    for a, b in u:
        sides = [
            normal((0.9 - x) / (0.3 * math.sqrt(2))) - normal((-0.9 - x) / (0.3 * math.sqrt(2)))
            for x in (a + b, a - b)
        ]
        want.append(sides[0] * sides[1])
    np.testing.assert_allclose(smoothed_indicator(u, 0.9, 0.3), want, atol=1e-12)


@pytest.mark.parametrize("width", [3, 4, 7])
@pytest.mark.parametrize("tau", [0.03, 0.25, 1.5])
def test_the_smoothed_ball_is_what_sampling_finds(width: int, tau: float) -> None:
    random = np.random.default_rng(1)
    u = random.normal(size=(4, width)) * 0.5 / width
    noise = random.standard_normal((100_000, width))
    for row, want in zip(u, smoothed_indicator(u, 1.0, tau), strict=True):
        hits = (np.abs(row + tau * noise).sum(1) <= 1).sum()
        error = math.sqrt(max(want * (1 - want) * len(noise), 1.0))
        # A binomial's upper tail is heavier than a normal's where it is rare.
        assert abs(hits - want * len(noise)) <= Z * error + Z**2 / 3


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_points_are_uniform_in_the_ball(width: int) -> None:
    points = uniform_in_ball(np.random.default_rng(2), 100_000, width, 0.7).T
    radius = np.abs(points).sum(1)
    assert radius.max() <= 0.7
    for share in (0.3, 0.5, 0.8):
        inside = share**width
        found = (radius <= share * 0.7).mean()
        assert abs(found - inside) <= Z * math.sqrt(inside * (1 - inside) / len(points))
    spread = points.std(0) / math.sqrt(len(points))
    assert (np.abs(points.mean(0)) <= Z * spread).all()


def test_the_volume_of_the_ball() -> None:
    assert volume(1, 0.5) == pytest.approx(1.0)
    assert volume(2, 1.0) == pytest.approx(2.0)
    assert volume(3, 2.0) == pytest.approx(4**3 / 6)


# The map


@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_mask_is_reproduced(width: int) -> None:
    """Across the edge of the ball, within the error its own variance predicts."""
    module = feature_maps.make("local", width, {"features": 200_000, "delta": 1.0, "tau": 0.25})
    along = np.linspace(0.0, 2.0, 9)[:, None] * np.ones(width) / width
    keys = np.random.default_rng(0).normal(size=along.shape)
    queries = keys + along
    frozen = [p.double() for p in module.frozen()]
    phi_q = module.phi(torch.from_numpy(queries), *frozen)
    phi_k = module.phi_key(torch.from_numpy(keys), *frozen)
    got = (phi_q * phi_k).sum(-1).numpy()
    mask = smoothed_indicator(along, 1.0, 0.25)
    # Cosines are bounded by c: Bernstein's term makes the normal quantile a safe one.
    c = volume(width, 1.0) * (2 * math.pi * 0.25**2) ** (-width / 2)
    error = np.sqrt(module.theoretical_error(queries, keys))
    assert (np.abs(got - mask) <= Z * error + Z**2 * 2 * c / (3 * 100_000)).all()
    assert mask[0] > 0.9 and mask[-1] < 0.05
    assert error.max() < 0.02, "the check would see nothing"


def test_its_variance_grows_exponentially_with_d() -> None:
    """For a mask as sharp: with tau = delta / 2d, equal points keep the kernel they had."""
    errors = []
    for width in range(1, 9):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = feature_maps.make("local", width, {"tau": 0.5 / width})
        assert isinstance(module, Local)
        same = np.zeros((1, width))
        assert 0.9 < module.kernel_value(same, same)[0] <= 1.0
        errors.append(module.relative_error())
    ratios = np.divide(errors[1:], errors[:-1])
    assert (ratios > 1.9).all()
    # Stirling: (4 d / sqrt(2 pi))^d / d! grows by 4 e / sqrt(2 pi) = 4.3 a dimension.
    assert 3.0 < ratios[-1] < 4.4


def test_a_wide_head_is_told_the_error_and_what_to_use() -> None:
    with pytest.warns(UserWarning, match=r"d = 6.*standard deviation of about .*'laplace'"):
        feature_maps.make("local", 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        feature_maps.make("local", 4)


def test_a_ball_that_smoothing_washes_away_is_refused() -> None:
    with pytest.raises(UsageError, match=r"d = 64, delta = 1 and tau = 0.25.*none.*'laplace'"):
        feature_maps.make("local", 64)


def test_positive_features_of_nearness_survive_normalisation() -> None:
    """At d = 32: nearer to exact local attention than a mean, and no sum cancels.

    Signed features of exp(-|q - k|_1 / delta) lose a third of the sum and more at the same M.
    """
    given = random_samples(32, 128, 0)
    samples = replace(given, queries=given.queries / 2, keys=given.keys / 2)
    against = reference(samples)
    q, k, v = samples.queries, samples.keys, samples.values
    found = {}
    for kind, options in (
        ("favor+*gaussian", {"bandwidth": 4.0}),
        ("favor+*laplace", {"delta": 16.0}),
    ):
        module = feature_maps.make(kind, 32, {"features": 1024, **options})
        kernel = module.kernel_value(q[:, against.tokens, None], k[:, None]) * against.mask
        output = kernel @ v / kernel.sum(-1, keepdims=True)
        judged = judge([module], replace(against, output=output))
        mean = against.mask / against.mask.sum(-1, keepdims=True) @ v
        found[kind] = judged, float(np.linalg.norm(mean - output) / np.linalg.norm(output))
    near, uniform = found["favor+*gaussian"]
    assert near.output_error is not None and near.output_error < uniform
    assert near.cancellation == pytest.approx(1)
    signed = found["favor+*laplace"][0].cancellation
    assert signed is not None and signed < 0.8


@pytest.mark.parametrize("kind", ["local", "laplace"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delta": 0.0}, r"'delta' is 0.0; expected float >= 1e-06 and <= "),
        ({"delta": -1.0}, r"'delta' is -1.0; expected float >= 1e-06 and <= "),
        ({"features": 0}, r"'features' is 0; expected int >= 1"),
        ({"features": 7}, r"'features' is 7; expected int >= 1 and <= .*, a multiple of 2"),
        ({"seed": -1}, r"'seed' is -1; expected int >= 0"),
        ({"dleta": 1.0}, r"unknown key 'dleta'. Did you mean 'delta'"),
    ],
)
def test_bad_options_are_refused(kind: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        feature_maps.make(kind, 3, options)


@pytest.mark.parametrize("tau", [0.0, -0.25, float("nan"), float("inf")])
def test_tau_is_positive(tau: float) -> None:
    with pytest.raises(UsageError, match=r"'tau' is .*; expected float >= 1e-06"):
        feature_maps.make("local", 3, {"tau": tau})
