"""Polynomials in place of an activation, against docs/math.md; claims that are wrong elsewhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import binom, poisson
from torch import nn

from linexport.errors import UsageError
from linexport.models.feed_forward import ACTIVATIONS, MAX_COST, bernstein, least_squares, taylor
from linexport.models.feed_forward.activations import Activation, find_activation
from linexport.models.feed_forward.polynomials import Polynomials
from linexport.models.feed_forward.problem import HELD_OUT, FeedForwardProblem, checked_problem

ALL = list(ACTIVATIONS.values())
SMOOTH = [f for f in ALL if not f.kink]
SERIES = [f for f in ALL if f.terms]
INTERVALS = [(-1.0, 1.0), (-3.0, 2.0), (0.5, 4.0), (-8.0, -0.1), (-0.01, 0.02)]


def bernstein_values(f: Activation, a: float, b: float, n: int, t: np.ndarray) -> np.ndarray:
    """B_n f from its definition, as an expectation over a binomial."""
    j = np.arange(n + 1)
    return np.asarray(binom.pmf(j, n, ((t - a) / (b - a))[:, None]) @ f(a + (b - a) * j / n))


def given(f: str = "gelu", out: int = 5, width: int = 3, scale: float = 1.0) -> FeedForwardProblem:
    torch.manual_seed(3)
    return checked_problem(nn.Linear(width, out), f, torch.randn(400, width) * scale, 0)


# Activations


@pytest.mark.parametrize("f", SMOOTH, ids=lambda f: f.name)
def test_curvature_is_the_largest_second_derivative(f: Activation) -> None:
    t = torch.linspace(-9, 9, 90_001, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(f.function(t).sum(), t, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), t)
    assert second.abs().max().item() == pytest.approx(f.curvature, rel=1e-6)
    assert second.abs().max().item() <= f.curvature * (1 + 1e-12)


def test_the_curvature_of_gelu_is_not_half_of_it() -> None:
    f, h = ACTIVATIONS["gelu"], 1e-3
    second = (f(np.array([h])) - 2 * f(np.array([0.0])) + f(np.array([-h])))[0] / h**2
    assert second == pytest.approx(2 / math.sqrt(2 * math.pi), abs=1e-5)
    assert second > 1.9 * (1 / math.sqrt(2 * math.pi))


@pytest.mark.parametrize("f", SERIES, ids=lambda f: f.name)
def test_the_power_series_is_the_function_within_its_radius(f: Activation) -> None:
    t = np.linspace(-0.7, 0.7, 29) * min(f.radius, 4.0)
    assert f.terms is not None
    value = f.linear * t + sum(c * t ** (f.first + 2 * k) for k, c in enumerate(f.terms(90)))
    np.testing.assert_allclose(value, f(t), atol=1e-13)


@pytest.mark.parametrize("f", [f for f in SERIES if f.radius < math.inf], ids=lambda f: f.name)
def test_the_radius_is_where_the_terms_stop_to_fall(f: Activation) -> None:
    assert f.terms is not None
    envelope = np.abs(f.terms(128)) * f.radius ** (2 * np.arange(128))
    # Complex pairs of poles make terms swing; their size neither falls nor grows.
    early, late = envelope[40:80].max(), envelope[88:].max()
    assert 0.9 < late / early < 1.1


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu-tanh"),
        (nn.SiLU(), "silu"),
        (nn.ReLU(), "relu"),
        (nn.Tanh(), "tanh"),
    ],
)
def test_modules_are_known(module: nn.Module, name: str) -> None:
    t = torch.linspace(-4, 4, 41, dtype=torch.float64)
    np.testing.assert_array_equal(find_activation(module)(t.numpy()), module(t).numpy())
    assert find_activation(module) is ACTIVATIONS[name]


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(UsageError, match="'Softplus'; expected gelu, gelu-tanh, silu, relu, tanh"):
        find_activation(nn.Softplus())
    with pytest.raises(UsageError, match="Did you mean 'gelu'"):
        find_activation("gelo")


# Bernstein


@pytest.mark.parametrize("n", [1, 2, 5, 12, bernstein.SAFE_DEGREE])
@pytest.mark.parametrize("f", ALL, ids=lambda f: f.name)
def test_coefficients_are_those_of_the_bernstein_polynomial(f: Activation, n: int) -> None:
    problem = given(f.name)
    found = Polynomials(bernstein.coefficients(problem, n), problem.scaled)
    for i, (middle, half) in enumerate(zip(problem.middle, problem.half, strict=True)):
        t = problem.rows @ problem.vectors[i]
        want = bernstein_values(f, middle - half, middle + half, n, t)
        np.testing.assert_allclose(found.at(problem.rows)[:, i], want, atol=1e-12)


@pytest.mark.parametrize("f", ALL, ids=lambda f: f.name)
@pytest.mark.parametrize(("a", "b"), INTERVALS)
def test_the_bias_is_below_its_bound(f: Activation, a: float, b: float) -> None:
    t = np.linspace(a, b, 501)
    for n in (1, 2, 3, 7, 20, 60):
        worst = np.abs(bernstein_values(f, a, b, n, t) - f(t)).max()
        assert worst <= bernstein.bound(f, b - a, n) * (1 + 1e-12)


@pytest.mark.parametrize("n", [2, 8, 20])
def test_half_of_the_bound_of_gelu_is_wrong(n: int) -> None:
    f = ACTIVATIONS["gelu"]
    worst = np.abs(bernstein_values(f, -1, 1, n, np.linspace(-1, 1, 201)) - f(np.array([0.0])))
    at_zero = float(bernstein_values(f, -1, 1, n, np.zeros(1))[0])
    assert worst.size and at_zero > 1.5 * bernstein.bound(f, 2, n) / 2


@pytest.mark.parametrize("f", ALL, ids=lambda f: f.name)
@pytest.mark.parametrize("target", [10.0, 1.0, 0.03, 1e-4])
def test_the_degree_is_the_smallest_that_will_do(f: Activation, target: float) -> None:
    problem = given(f.name)
    n = bernstein.degree(problem, target)
    assert bernstein.bias(problem, n) <= target * (1 + 1e-9)
    assert n == 1 or bernstein.bias(problem, n - 1) > target
    if not f.kink:
        root = math.sqrt(len(problem.half)) * (2 * problem.half.max()) ** 2 * f.curvature
        assert n == math.ceil(root / (8 * math.sqrt(target)))


def rounding(f: Activation, n: int, scaled: bool = True) -> float:
    """Largest error of B_n f in float32 by powers, relative to max|f|, over many intervals."""
    u, basis, worst = np.linspace(-1, 1, 201), bernstein.basis(n), 0.0
    for middle in (-5, -2, -1, -0.3, 0, 0.5, 2, 5):
        for half in (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64):
            values = f(middle + half * np.linspace(-1, 1, n + 1))
            if (size := np.abs(values).max()) < 1e-3:
                continue
            want = binom.pmf(np.arange(n + 1), n, ((1 + u) / 2)[:, None]) @ values
            c, x = values @ basis, u
            if not scaled:
                line = np.polynomial.Polynomial([-middle / half, 1 / half])
                c, x = np.polynomial.Polynomial(c)(line).coef, middle + half * u
            powers = np.cumprod(np.tile(x.astype(np.float32), (n + 1, 1)), 0, dtype=np.float32)
            powers = np.concatenate([np.ones_like(powers[:1]), powers[:-1]])
            got = (c.astype(np.float32)[:, None] * powers).sum(0, dtype=np.float32)
            worst = max(worst, float(np.abs(got - want).max() / size))
    return worst


def test_the_safe_degree_is_where_float32_still_holds_every_activation() -> None:
    n = bernstein.SAFE_DEGREE
    assert max(rounding(f, n) for f in ALL) < 1e-4 < max(rounding(f, n + 4) for f in ALL)


def test_coefficients_of_the_unscaled_variable_are_ill_conditioned() -> None:
    """Already at a degree of which those of the scaled one lose nothing to speak of."""
    f = ACTIVATIONS["gelu"]
    assert rounding(f, 12) < 1e-6
    assert rounding(f, 12, scaled=False) > 500 * rounding(f, 12)


# Least squares


@pytest.mark.parametrize("degree", [1, 2, 5])
def test_least_squares_are_least(degree: int) -> None:
    problem = given("silu")
    found = least_squares.of_degree(problem, degree)
    want = problem.outputs(problem.rows)
    for i in range(5):
        u = problem.rows @ problem.scaled[i]
        fitted = np.polynomial.Polynomial.fit(u, want[:, i], degree, domain=[-1, 1]).coef
        np.testing.assert_allclose(found.coefficients[i], fitted, atol=1e-10)
    errors = ((found.at(problem.rows) - want) ** 2).mean(0)
    rival = Polynomials(bernstein.coefficients(problem, degree), problem.scaled)
    assert (errors < ((rival.at(problem.rows) - want) ** 2).mean(0)).all()


def test_least_squares_take_the_lowest_degree_that_will_do() -> None:
    problem = given()
    want = problem.outputs(problem.rows)

    def error(degree: int) -> float:
        found = least_squares.of_degree(problem, degree).at(problem.rows)
        return float(((found - want) ** 2).sum(1).mean())

    target = (error(3) + error(4)) / 2
    found = least_squares.fit(problem, target)
    assert found.degree == next(n for n in range(1, 9) if error(n) <= target)
    assert least_squares.fit(problem, None).degree == 2
    with pytest.raises(UsageError, match="up to degree 12 comes within target_error 1e-30"):
        least_squares.fit(problem, 1e-30)


# Taylor's draws


def test_the_mean_of_k() -> None:
    """False alarm: six standard errors of a mean of 10^6 draws, 2e-9 each."""
    k = np.arange(taylor.TERMS)
    for seed, rho in enumerate((0.3, 0.5, 0.9)):
        times = taylor.draw(taylor.Degrees("geometric", rho), 10**6, seed)
        error = math.sqrt(1 - rho) / rho / 1e3
        assert abs(times @ k / 1e6 - (1 / rho - 1)) < 6 * error
        assert abs(times @ k / 1e6 - (1 / rho + 1)) > 100 * error, "wrong elsewhere"
    for seed, mean in enumerate((0.25, 1.5, 4.0)):
        law = taylor.Degrees("poisson", mean)
        assert law.mean == mean and law.probabilities().sum() == pytest.approx(1)
        np.testing.assert_allclose(law.probabilities(), poisson.pmf(k, mean), rtol=1e-10)
        assert abs(taylor.draw(law, 10**6, seed) @ k / 1e6 - mean) < 6e-3 * math.sqrt(mean)


@pytest.mark.parametrize("s", [0.5, 2.5, 12.0])
def test_no_law_of_degrees_is_better_than_poissons_for_one_moment(s: float) -> None:
    """With c_k = 1 / (2^k k!), whose second moments have the closed forms of docs/math.md."""
    k = np.arange(200)
    logs = -2 * k * math.log(2) - 2 * np.array([math.lgamma(i + 1) for i in k])
    logs += 2 * k * math.log(s)

    def moment(p: np.ndarray) -> float:
        return float(np.exp(logs[p > 0] - np.log(p[p > 0])).sum())

    poissons = min(moment(poisson.pmf(k, rate)) for rate in np.linspace(0.1, 10, 400))
    geometric = min(moment(rho * (1 - rho) ** k) for rho in np.linspace(0.02, 0.98, 400))
    assert poissons == pytest.approx(math.exp(s), rel=1e-3)
    assert poissons < geometric


def test_the_law_of_the_least_variance_is_taken_and_poissons_never_within_a_radius() -> None:
    problem = given(scale=0.5)
    law, least = taylor.best(problem)
    second = problem.rows.shape[1] * (problem.rows**2 @ (problem.vectors**2).T)
    t = problem.rows @ problem.vectors.T

    def largest(laws: tuple[taylor.Degrees, ...]) -> float:
        found = taylor.variance(problem.activation, laws, second, t)
        return float(found.sum(2).max(1).min())

    both = {"poisson": largest(taylor.POISSON), "geometric": largest(taylor.GEOMETRIC)}
    assert both[law.kind] == min(both.values()) == pytest.approx(least) and 0 < least < math.inf
    assert taylor.best(given("silu", scale=0.3))[0].kind == "geometric"


def test_gelu_keeps_half_of_x() -> None:
    problem = given(scale=0.3)
    for seed in range(5):
        found, _, _ = taylor.fit(problem, 0.5, seed, MAX_COST)
        assert (found.coefficients[:, 1] == 0.5).all()
        assert not found.coefficients[:, 3::2].any() and not found.coefficients[:, 0].any()


def test_no_power_series_no_composition() -> None:
    with pytest.raises(UsageError, match="relu has no power series"):
        taylor.fit(given("relu"), 0.1, 0, MAX_COST)


def test_outside_the_radius_there_is_no_composition() -> None:
    with pytest.raises(UsageError, match=r"radius 1\.57.*calibration data reach"):
        taylor.fit(given("tanh", scale=3.0), 0.1, 0, MAX_COST)


def test_more_draws_than_any_budget_allows_are_refused_with_the_table() -> None:
    with pytest.raises(
        UsageError, match=r"(?s)max_cost is 12,345.*random_monomials.*\.\.\."
    ) as error:
        taylor.fit(given(scale=6.0), 1e-3, 0, 12_345)
    assert len(str(error.value).splitlines()) < 25


def test_what_is_held_out_is_not_fitted_to() -> None:
    problem = given()
    assert len(problem.held_out) == HELD_OUT * 400 and len(problem.rows) == 300
    t = problem.rows @ problem.scaled.T
    assert 0.9 < np.abs(t).max() < 0.92, "intervals are a tenth wider than the data"
