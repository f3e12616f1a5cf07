"""Chebyshev and Bernstein polynomials of high degree, as products over few inputs."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.polynomial.chebyshev import chebval
from scipy.stats import binom
from torch import nn

import linexport
from linexport.errors import UsageError
from linexport.models.feed_forward import (
    ACTIVATIONS,
    ChebyshevFeedForward,
    KernelFeedForward,
    bernstein,
    chebyshev,
    linearize_feed_forward,
)
from linexport.models.feed_forward.activations import Activation
from linexport.models.feed_forward.chebyshev_layer import chebyshev as polynomials
from linexport.models.feed_forward.chebyshev_layer import on_box
from linexport.models.feed_forward.problem import FeedForwardProblem, checked_problem
from linexport.models.feed_forward.product_basis import ProductBasis, count

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = list(ACTIVATIONS.values())
U = np.cos(np.linspace(0, np.pi, 2001))


def block(width: int = 2, hidden: int = 64, out: int = 1, f: Any = nn.GELU) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, hidden), f(), nn.Linear(hidden, out)).eval()


def inputs(width: int = 2, count: int = 500, seed: int = 1) -> torch.Tensor:
    return torch.rand(count, width, generator=torch.Generator().manual_seed(seed)) * 4 - 1


INTERVALS = [(m, h) for m in (-5.0, -0.3, 0.0, 2.0) for h in (0.25, 1.0, 8.0, 64.0)]


def problem_of(f: str, *intervals: tuple[float, float]) -> FeedForwardProblem:
    """An output for each interval middle ± half."""
    rows = np.stack([np.linspace(-1, 1, 9), np.ones(9)], axis=1)
    middle, half = np.array(intervals).T
    vectors = np.stack([half, middle], axis=1)
    return FeedForwardProblem(ACTIVATIONS[f], rows, rows, np.zeros(1), vectors, middle, half)


def values(problem: FeedForwardProblem, u: np.ndarray) -> np.ndarray:
    """The activation on every interval, (out, points)."""
    return problem.activation(problem.middle[:, None] + problem.half[:, None] * u)


@pytest.mark.parametrize("f", ALL, ids=lambda f: f.name)
def test_the_error_is_below_its_bound(f: Activation) -> None:
    problem = problem_of(f.name, *INTERVALS)
    found, want = chebyshev.series(problem, chebyshev._TERMS), values(problem, U)
    bounds = chebyshev.bias(problem, found)
    for n in (1, 4, 25, 60, chebyshev.HIGHEST):
        errors = np.abs(chebval(U, found[:, : n + 1].T) - want).max(1)
        assert (errors**2).sum() <= bounds[n] * (1 + 1e-9) + 1e-24


def test_the_bound_is_nearly_reached() -> None:
    """Of GELU on [-4, 4] within a factor of three, and below 1e-6 where Bernstein's is 0.02."""
    problem = problem_of("gelu", (0.0, 4.0))
    found = chebyshev.series(problem, chebyshev._TERMS)
    bound = float(np.sqrt(chebyshev.bias(problem, found)[30]))
    error = np.abs(chebval(U, found[0, :31]) - values(problem, U)).max()
    assert bound / 3 < error < bound < 1e-6
    assert bernstein.bound(problem.activation, 8.0, 256) > 0.02


@given(
    width=st.integers(1, 4),
    degree=st.integers(1, 9),
    seed=st.integers(0, 10**6),
)
@settings(deadline=None, max_examples=40)
def test_products_have_the_value_of_the_polynomial(width: int, degree: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    series = random.standard_normal((3, degree + 1))
    vectors = random.standard_normal((3, width))
    vectors /= np.abs(vectors).sum(1, keepdims=True)
    basis = ProductBasis.of(width, degree)
    assert len(basis.degrees) == count(width, degree)
    assert len({tuple(m) for m in basis.degrees.tolist()}) == len(basis.degrees)
    assert basis.degrees.sum(1).max() == degree
    z = random.uniform(-1, 1, (20, width))
    angles = np.arccos(z)
    values = np.cos(angles[:, None] * basis.degrees).prod(2)
    got = values @ basis.compose(series, vectors).T
    want = chebval(z @ vectors.T, series.T[:, None], tensor=False)
    np.testing.assert_allclose(got, want, atol=1e-11)


def test_high_degrees_stay_exact() -> None:
    """T_100 of a sum of two, whose coefficients in powers are of the size of 2^99."""
    basis = ProductBasis.of(2, 100)
    series = np.eye(101)[100:]
    found = basis.compose(series, np.array([[0.7, -0.3]]))
    assert np.abs(found).max() < 4
    z = np.random.default_rng(0).uniform(-1, 1, (50, 2))
    values = np.cos(np.arccos(z)[:, None] * basis.degrees).prod(2)
    want = np.cos(100 * np.arccos(z @ [0.7, -0.3]))
    np.testing.assert_allclose(values @ found[0], want, atol=1e-9)


@pytest.mark.parametrize("degree", [1, 2, 3, 7, 8, 25, 100, chebyshev.HIGHEST])
def test_the_polynomials_are_cosines(degree: int) -> None:
    z = torch.linspace(-1, 1, 101, dtype=torch.float64)
    found = polynomials(z.reshape(1, -1), degree)
    want = torch.cos(torch.acos(z) * torch.arange(degree + 1)[:, None, None])
    torch.testing.assert_close(found, want, atol=1e-10, rtol=0)
    single = polynomials(z.float().reshape(1, -1), degree).double()
    exact = polynomials(z.float().double().reshape(1, -1), degree)
    assert float((single - exact).abs().max()) < 1e-6 * degree


@pytest.mark.parametrize("f", ALL, ids=lambda f: f.name)
def test_float32_holds_every_activation_at_the_highest_degree(f: Activation) -> None:
    n, u = chebyshev.HIGHEST, U.astype(np.float32)
    single = polynomials(torch.from_numpy(u)[None], n)[:, 0]
    problem = problem_of(f.name, *INTERVALS)
    size = np.abs(values(problem, U)).max(1)
    for series in (
        chebyshev.series(problem, chebyshev._TERMS)[:, : n + 1],
        chebyshev.from_values(bernstein.values(problem, n, chebyshev.nodes(n))),
    ):
        want = chebval(u.astype(np.float64), series.T)
        got = (torch.from_numpy(series).float() @ single).double().numpy()
        assert (np.abs(got - want).max(1) < 1e-4 * size)[size > 1e-3].all()


@pytest.mark.parametrize("n", [1, 7, 60, 200])
@pytest.mark.parametrize("f", ["gelu", "relu"])
def test_bernstein_is_the_mean_over_a_binomial(f: str, n: int) -> None:
    problem = problem_of(f, (0.5, 3.0))
    j = np.arange(n + 1)
    u = np.linspace(-1, 1, 101)
    want = binom.pmf(j, n, ((1 + u) / 2)[:, None]) @ ACTIVATIONS[f](-2.5 + 6 * j / n)
    series = chebyshev.from_values(bernstein.values(problem, n, chebyshev.nodes(n)))
    np.testing.assert_allclose(chebval(u, series[0]), want, atol=1e-11)


@pytest.mark.parametrize(
    ("form", "width"),
    [*(("chebyshev", width) for width in (1, 2, 3)), ("bernstein", 1), ("bernstein", 2)],
)
def test_the_layer_keeps_its_bound_everywhere_in_the_box(form: str, width: int) -> None:
    module = block(width, hidden=16)
    in_box, _ = on_box(checked_problem(module[0], "gelu", inputs(width), 0))
    target = 0.02 if form == "chebyshev" else bernstein.bias(in_box, 40)
    layer, report = linearize_feed_forward(
        module[0], "gelu", inputs(width), form, target_error=target, max_cost=10**8
    )
    assert isinstance(layer, ChebyshevFeedForward) and not report.folded
    assert report.form == form and report.bound is not None and report.bound <= target
    assert report.features == count(width, report.degree) == layer.weight.shape[1]
    assert report.rounding < 1e-5 and report.error <= report.bound
    corners = torch.from_numpy(np.stack(np.meshgrid(*[(-1.0, 3.0)] * width), -1)).float()
    x = torch.cat([corners.reshape(-1, width), inputs(width, 300, seed=5)])
    with torch.no_grad():
        y = torch.nn.functional.gelu(module[0](x))
    assert float((layer(x) - y).square().sum(1).max()) <= report.bound * (1 + 1e-4)


def test_degrees_above_25_that_powers_cannot_have() -> None:
    """ReLU takes them; the layer after it is folded in, and the cost is below that of both."""
    module = block(1, hidden=256, out=2, f=nn.ReLU)
    data = inputs(1, 2000)
    in_box, _ = on_box(checked_problem(module[0], "relu", data, 0))
    for form, target in (("chebyshev", 0.05), ("bernstein", bernstein.bias(in_box, 80))):
        layer, report = linearize_feed_forward(
            module[0], "relu", data, form, following=module[2], target_error=target
        )
        assert 25 < report.degree <= chebyshev.HIGHEST and report.folded
        assert report.multiply_adds < report.multiply_adds_before == 256 * 3
        fresh = inputs(1, 300, seed=7)
        with torch.no_grad():
            want = module(fresh)
            away = float((layer(fresh) - want).square().sum(1).mean())
        assert away <= report.bound and away < 2 * report.error + 1e-6


def test_beyond_the_box_it_stays_at_the_edge() -> None:
    layer, _ = linearize_feed_forward(block()[0], "gelu", inputs(), "chebyshev", target_error=0.01)
    edge = layer.centre + 1 / layer.inverse
    assert torch.equal(layer(edge * torch.tensor([50.0, 1.0])), layer(edge))


def test_an_input_that_never_varies_is_no_obstacle() -> None:
    data = torch.cat([inputs(1), torch.full((500, 1), 3.0)], 1)
    module = block()
    layer, report = linearize_feed_forward(module[0], "gelu", data, "chebyshev", target_error=0.001)
    with torch.no_grad():
        y = torch.nn.functional.gelu(module[0](data))
    assert float((layer(data) - y).square().sum(1).mean()) <= 0.001 and report.outside == 0


def test_linearize_saves_a_program(tmp_path: Any) -> None:
    module, data, row = linearized(tmp_path / "few.pt2")
    loaded = torch.export.load(tmp_path / "few.pt2").module()
    assert away(module, loaded, data) < 1.5 * row.relative_error + 1e-4


@pytest.mark.slow
def test_it_converts_and_runs(tmp_path: Any) -> None:
    module, data, row = linearized(tmp_path / "few.pt2")
    done = linexport.convert(str(tmp_path / "few.pt2"), tmp_path / "artifact", bench=False)
    assert done.status == "ok"
    model = linexport.load(tmp_path / "artifact")
    (got,) = model.run(data.numpy()).values()
    assert away(module, lambda _: torch.from_numpy(got), data) < 1.5 * row.relative_error + 1e-4


def linearized(path: Any) -> Any:
    """The original, fresh data, and the row of the report."""
    module = block(2, 256, 3)
    found = linexport.linearize(
        module, inputs(), feed_forward="chebyshev", target_error=0.1, map="keep", bench=False
    )
    (row,) = found.report.feed_forward
    assert row.form == "chebyshev" and row.folded and row.cost_factor < 1
    assert found.report.status == "ok"
    found.save(path)
    return module, inputs(count=50, seed=9), row


@torch.no_grad()
def away(module: Any, other: Any, data: torch.Tensor) -> float:
    want = module(data)
    return float((other(data) - want).norm() / want.norm())


@pytest.mark.parametrize("shape", [(2,), (7, 2), (2, 7, 2), (2, 3, 7, 2), (2, 0, 2)])
def test_any_leading_axes(shape: tuple[int, ...]) -> None:
    layer, _ = linearize_feed_forward(block()[0], "gelu", inputs(), "chebyshev", target_error=0.1)
    x = torch.rand(shape)
    assert layer(x).shape == (*shape[:-1], 64)
    torch.testing.assert_close(layer(x).reshape(-1, 64), layer(x.reshape(-1, 2)))
    assert layer(x.half()).dtype == torch.float16
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    again = ChebyshevFeedForward.from_config(layer.config)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(again(x), layer(x))


def test_what_cannot_be_built_is_refused_with_its_own_numbers() -> None:
    with pytest.raises(UsageError, match="chebyshev' needs a target_error"):
        linearize_feed_forward(block()[0], "gelu", inputs(), "chebyshev")
    relu = block(1, f=nn.ReLU)[0]
    with pytest.raises(UsageError, match=r"a degree above 256\. At 256 the bound on the squared"):
        linearize_feed_forward(relu, "relu", inputs(1), "chebyshev", target_error=1e-9)
    with pytest.raises(UsageError, match=r"of degree [\d,]+, and at most degree 256 is built"):
        linearize_feed_forward(relu, "relu", inputs(1), "bernstein", target_error=1e-9)
    wide = block(16)
    with pytest.raises(UsageError, match=r"(?s)max_cost is 10,000,000\.\ndegree \d+: [\d,]+ prod"):
        linearize_feed_forward(wide[0], "gelu", inputs(16), "chebyshev", target_error=1e-3)
    with pytest.raises(UsageError, match=r"has [\d,]+ weights for each of 4 outputs"):
        ChebyshevFeedForward.from_config({"in_features": 40, "out_features": 4, "degree": 200})


def test_bernstein_takes_what_costs_less() -> None:
    """Maps of powers for five inputs, products of Chebyshev polynomials for one."""
    five = nn.Linear(5, 4)
    layer, _ = linearize_feed_forward(five, "gelu", inputs(5) * 0.3, "bernstein", target_error=0.05)
    assert isinstance(layer, KernelFeedForward)
    problem = checked_problem(five, "gelu", inputs(5) * 0.3, 0)
    in_box, _ = on_box(problem)
    assert (in_box.half >= problem.half * (1 - 1e-12)).all()
