"""The layer made of feature maps: its identity, its variance, its cost, its export, its refusals.

Means of random layers are held against theory at six standard errors with samples of near-normal
averages, 2e-9 a check; the checks of this file together raise a false alarm less than once in 10^6.
"""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from linexport import passes, targets, trace
from linexport.artifact import write
from linexport.errors import UsageError
from linexport.models import feature_maps
from linexport.models.feed_forward import (
    KernelFeedForward,
    bernstein,
    least_squares,
    linearize_feed_forward,
    powers,
    taylor,
)
from linexport.models.feed_forward.polynomials import Polynomials
from linexport.models.feed_forward.power_plan import FeedForwardPlan, build, plan
from linexport.models.feed_forward.powers import Cost, Variance
from linexport.models.feed_forward.problem import FeedForwardProblem, checked_problem
from linexport.sources.loaded_model import LoadedModel, Source
from linexport.targets.lowering.choice import lower

ERRORS = 6.0
FORMS = {"least-squares": None, "bernstein": 0.05, "taylor": 0.2}
"""Forms, with the error asked for of the layer below."""

IN, OUT = 5, 4


def linear(scale: float = 1.0) -> nn.Linear:
    torch.manual_seed(5)
    layer = nn.Linear(IN, OUT)
    with torch.no_grad():
        layer.weight *= scale
        layer.bias *= scale
    return layer


def inputs(count: int = 320, seed: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, IN, generator=generator) * 0.6 + 0.3


def replaced(form: str, seed: int = 0, **more: Any) -> Any:
    arguments = {"target_error": FORMS[form], "seed": seed, **more}
    return linearize_feed_forward(linear(), "gelu", inputs(), form, **arguments)


def given() -> FeedForwardProblem:
    return checked_problem(linear(), "gelu", inputs(), 0)


# The powers


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_the_variance_is_that_of_the_maps(degree: int) -> None:
    problem = given()
    variance = Variance(problem.rows, problem.scaled)
    weights = np.linspace(0.5, 2.0, len(problem.scaled))
    size, reached = variance.sketch_size(degree, weights, 0.03)

    def largest(kind: str, features: int) -> np.ndarray:
        one = feature_maps.make(kind, IN + 1, {"features": features, "degree": degree})
        pairs = ((np.tile(v, (len(problem.rows), 1)), problem.rows) for v in problem.scaled)
        return np.array([one.theoretical_error(*pair).max() for pair in pairs])

    np.testing.assert_allclose(
        2 * largest("random_monomials", 2), variance.random_monomials(degree), rtol=1e-9
    )
    assert reached == pytest.approx((weights * largest("tensor_sketch", size)).max(), rel=1e-9)
    assert reached <= 0.03 < (weights * largest("tensor_sketch", size - 2)).max()


@pytest.mark.parametrize("kind", ["random_monomials", "tensor_sketch"])
def test_widths_without_the_constant_of_the_map_are_wrong(kind: str) -> None:
    """|v|^(2k) |x'|^(2k) / m is exceeded: by x = v along one component, by x = v at all."""
    x = np.eye(4)[:1] if kind == "random_monomials" else np.full((1, 8), 8**-0.5)
    squares = []
    for seed in range(400):
        options = {"features": 32, "degree": 2, "seed": seed}
        phi = feature_maps.make(kind, x.shape[1], options)
        frozen = [p.double() if p.is_floating_point() else p for p in phi.frozen()]
        features = phi.phi(torch.from_numpy(x), *frozen)
        squares.append(float((features @ features.mT).item() - 1) ** 2)
    mean, error = np.mean(squares), np.std(squares) / math.sqrt(len(squares))
    assert mean - ERRORS * error > 1 / 32
    truth = phi.theoretical_error(x, x)
    assert truth is not None and mean <= truth[0] + ERRORS * error


def test_the_cheapest_map_that_will_do_is_taken() -> None:
    problem = given()
    found = bernstein.fit(problem, 0.05)
    chosen = powers.choose(problem, found, 0.05)
    assert [p.degree for p in chosen] == list(range(2, found.degree + 1))
    assert {"quadratic", "random_monomials"} <= {p.kind for p in chosen}
    assert sum(p.error for p in chosen) <= 0.05
    for p in chosen:
        exact = powers.exact(p.degree, IN + 1)
        assert p.multiply_adds + OUT * p.features <= exact.multiply_adds + OUT * exact.features
    assert all(p.error == 0 for p in powers.choose(problem, found, None))
    tight = powers.choose(problem, found, 1e-6)
    assert sum(p.features for p in tight) > sum(p.features for p in chosen)


def test_a_sketch_is_taken_where_components_are_many() -> None:
    """Random monomials of vectors along one component are off by d^k; sketches do not care."""
    vectors = np.eye(60)[:1] * 0.5
    problem = given()
    rows = np.zeros((8, 60))
    rows[:, 0] = 1.0
    lone = FeedForwardProblem(
        problem.activation, rows, rows, rows[0], vectors, np.zeros(1), np.ones(1)
    )
    found = Polynomials(np.array([[0.0, 0.0, 0.0, 0.0, 0.1]]), vectors)
    (power,) = powers.choose(lone, found, 1e-2)
    assert power.kind == "tensor_sketch" and power.error <= 1e-2
    (config,) = [power.map(0)]
    assert feature_maps.make(config["kind"], 60, config["options"]).features == power.features


# The layer


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_with_exact_maps_the_layer_is_the_polynomial(degree: int) -> None:
    problem = given()
    for found in (
        least_squares.of_degree(problem, degree),
        Polynomials(bernstein.coefficients(problem, degree), problem.scaled),
    ):
        layer, weight = build(
            problem, FeedForwardPlan(found, powers.choose(problem, found, None), None), 0
        )
        want = found.at(problem.held_out)
        np.testing.assert_allclose(layer.exactly(weight, problem.held_out), want, atol=1e-11)
        x = torch.from_numpy(problem.held_out[:, :-1] + problem.centre).float()
        np.testing.assert_allclose(layer(x).numpy(), want, atol=1e-5)


def test_random_maps_are_right_on_average_and_vary_no_more_than_stated() -> None:
    problem, rows = given(), given().rows[:10]
    planned = plan(problem, "bernstein", 0.05, 0)
    assert any(p.kind == "random_monomials" for p in planned.powers)
    sample = []
    for seed in range(200):
        layer, weight = build(problem, planned, seed)
        sample.append(layer.exactly(weight, rows))
    check_moments(
        np.stack(sample), planned.polynomials.at(rows), sum(p.error for p in planned.powers)
    )


def check_moments(sample: np.ndarray, mean: np.ndarray, stated: float) -> None:
    """Of layers (n, rows, out): means over rows, and the squared distance of every row."""
    away = ((sample - mean) * np.sign(mean)).mean((1, 2))
    assert abs(away.mean()) < ERRORS * away.std() / math.sqrt(len(sample))
    squares = ((sample - mean) ** 2).sum(2)
    errors = squares.std(0) / math.sqrt(len(sample))
    assert (squares.mean(0) - ERRORS * errors <= stated).all()


def test_the_composition_is_unbiased_and_of_the_stated_variance() -> None:
    problem = checked_problem(linear(0.6), "gelu", inputs(), 0)
    rows = problem.rows[:10]
    law, single = taylor.best(problem)
    count, sample = 600, []
    for seed in range(200):
        planned = FeedForwardPlan(*taylor.drawn(problem, law, count, seed), None)
        layer, weight = build(problem, planned, seed)
        sample.append(layer.exactly(weight, rows))
    drawn, want = np.stack(sample), problem.outputs(rows)
    check_moments(drawn, want, single / count)
    second = (IN + 1) * (rows**2 @ (problem.vectors**2).T)
    (one,) = taylor.variance(problem.activation, [law], second, rows @ problem.vectors.T)
    squares = ((drawn - want) ** 2).sum(2)
    # Both ways: this one is no bound.
    away = np.abs(squares.mean(0) - one.sum(1) / count)
    assert (away < ERRORS * squares.std(0) / math.sqrt(len(drawn))).all()


@pytest.mark.parametrize("form", FORMS)
def test_the_report_says_what_the_layer_is(form: str) -> None:
    said: list[str] = []
    layer, report = replaced(form, say=said.append)
    assert said == [report.table]
    assert report.form == form and report.activation == "gelu"
    assert layer.weight.shape == (OUT, report.features)
    assert report.parameters == sum(b.numel() for b in layer.buffers())
    assert report.parameters_before == OUT * IN + OUT
    assert report.multiply_adds_before == OUT * IN
    assert report.multiply_adds > OUT * report.features
    assert f"{report.multiply_adds:,}" in report.table
    assert 0 < report.relative_error < 0.5 and report.rounding < 1e-4 and report.outside < 0.1
    target = FORMS[form]
    if target is None:
        assert report.bound is None and report.degree == 2
    else:
        assert report.bound is not None and report.error < report.bound <= 2 * target
    assert json.loads(json.dumps(asdict(report)))["features"] == report.features
    assert not list(layer.parameters())


@pytest.mark.parametrize("form", FORMS)
def test_the_same_seed_gives_the_same_bytes(form: str) -> None:
    first, again, other = (replaced(form, seed)[0] for seed in (0, 0, 1))
    for name, buffer in first.state_dict().items():
        assert torch.equal(buffer, again.state_dict()[name])
    assert not torch.equal(first(inputs()), other(inputs()))


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_rebuilds_the_layer(form: str) -> None:
    layer, _ = replaced(form)
    file = io.BytesIO()
    torch.save({"config": layer.config, "weights": layer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    rebuilt = KernelFeedForward.from_config(json.loads(json.dumps(loaded["config"])))
    rebuilt.load_state_dict(loaded["weights"])
    assert torch.equal(rebuilt(inputs()), layer(inputs()))


def test_a_config_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="missing key 'maps'"):
        KernelFeedForward.from_config({"in_features": 3, "out_features": 2})


@pytest.mark.parametrize("shape", [(IN,), (7, IN), (2, 7, IN), (2, 3, 7, IN), (2, 0, IN)])
def test_any_leading_axes(shape: tuple[int, ...]) -> None:
    layer, _ = replaced("bernstein")
    x = torch.randn(shape)
    y = layer(x)
    assert y.shape == (*shape[:-1], OUT)
    torch.testing.assert_close(y.reshape(-1, OUT), layer(x.reshape(-1, IN)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_its_buffers(dtype: torch.dtype) -> None:
    layer, _ = replaced("least-squares")
    x = inputs().to(dtype)
    want = layer(x.float())
    got = layer.to(dtype)(x)
    assert got.dtype == dtype and layer.weight.dtype == torch.float32
    torch.testing.assert_close(got.float(), want.to(dtype).float(), atol=0, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_exported_is_equal(form: str, tmp_path: Path) -> None:
    layer, _ = replaced(form)
    dynamic = torch.export.Dim.DYNAMIC
    loaded = LoadedModel(
        module=layer,
        args=(inputs(60).reshape(2, 30, IN),),
        kwargs={},
        dynamic_shapes=({0: dynamic, 1: dynamic},),
        source=Source("factory", "tests", None, form),
    )
    target = targets.find_target("ort")
    model = target.prepare(passes.run(trace.trace(loaded).model, passes.STATELESS))
    mapped = [node for node in model.graph.node if node.op_type == "FeatureMap"]
    assert len(mapped) == len(layer.maps)
    lowered, _ = lower(model, target.candidates)
    session = target.open(write.save_model(lowered, tmp_path), threads=1)
    for shape in ((3, 31, IN), (1, 1, IN)):
        x = inputs(shape[0] * shape[1], seed=9).reshape(shape)
        (got,) = session.run({model.graph.input[0].name: x.numpy()}).values()
        np.testing.assert_allclose(got, layer(x).numpy(), atol=1e-5)


# Bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"calibration": torch.zeros(0, IN)}, "0 rows of calibration data; expected at least 8"),
        ({"calibration": torch.ones(50, IN)}, "All 50 rows of the calibration data are the same"),
        ({"calibration": torch.ones(50, IN + 1)}, r"shape \(50, 6\); expected \(\.\.\., 5\)"),
        ({"calibration": torch.ones(IN)}, r"shape \(5,\)"),
        ({"calibration": torch.ones(50, IN, dtype=torch.int64)}, "int64; expected a tensor of f"),
        ({"calibration": [1.0]}, "are list; expected a tensor of floats"),
        ({"calibration": torch.full((50, IN), math.nan)}, "NaN or infinite entries"),
        ({"linear": nn.ReLU()}, "Only an nn.Linear can be linearised; found ReLU"),
        ({"activation": "softplus"}, "Unknown activation 'softplus'"),
        ({"form": "legendre"}, "Unknown form 'legendre'; expected one of least-sq"),
        ({"form": "bernstein"}, "form='bernstein' needs a target_error"),
        ({"form": "taylor"}, "form='taylor' needs a target_error"),
        ({"target_error": -1.0}, "target_error is -1.0; expected a positive number"),
        ({"target_error": math.nan}, "target_error is nan"),
        ({"max_cost": 0}, "max_cost is 0; expected at least 1"),
        ({"max_cost": 100}, r"(?s)max_cost is 100\.\ndegree .*quadratic.*before +20"),
        ({"max_cost": 100}, r"\nTake form='low-rank', or raise max_cost\."),
        (
            {"max_cost": 9, "form": "low-rank"},
            "costs at most the 9 multiply-adds of max_cost: rank 1",
        ),
        ({"form": "bernstein", "target_error": 1e-5}, "and at most degree 256 is built"),
        ({"form": "bernstein", "target_error": 0.01, "max_cost": 1000}, r"(?s)degree.*monomials"),
        ({"form": "bernstein", "target_error": 0.01, "max_cost": 1000}, "'least-squares' or 'low-"),
    ],
)
def test_what_cannot_be_done_is_refused(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "linear": linear(),
        "activation": "gelu",
        "calibration": inputs(),
    }
    with pytest.raises(UsageError, match=message):
        linearize_feed_forward(**{**arguments, **change})


def test_intervals_that_degenerate_are_refused() -> None:
    layer = linear()
    with torch.no_grad():
        layer.weight[2] = 0
    with pytest.raises(UsageError, match=r"intervals of 1 of 4 outputs degenerate.* at 2\."):
        linearize_feed_forward(layer, "gelu", inputs())
    with torch.no_grad():
        layer.weight[0, 0] = math.inf
    with pytest.raises(UsageError, match="The layer has NaN or infinite weights"):
        linearize_feed_forward(layer, "gelu", inputs())


def test_a_refusal_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelFeedForward, "__init__", partial(pytest.fail, "built"))
    said: list[str] = []
    with pytest.raises(UsageError):
        replaced("bernstein", max_cost=50, say=said.append)
    assert len(said) == 1 and "all" in said[0]


def test_costs_beyond_any_integer_are_still_told() -> None:
    cost = Cost(5, 4, [powers.random_monomials(2, 10**300, 0.0)])
    with pytest.raises(UsageError, match=r"cost 6\.0e\+300 multiply-adds"):
        powers.check_cost(cost.multiply_adds, 10**7, cost.table(), "taylor", 0.1)
