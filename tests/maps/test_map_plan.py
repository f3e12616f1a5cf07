"""Planning features: the promise holds over draws, and what is chosen is what was measured.

A promise says P(error > e) <= 1 - p. With so many successes in N draws, the hypothesis that their
probability is not below p is rejected where a binomial of p would have as few with a chance of 1e-6
in all checks of this file together.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from linexport import models
from linexport.errors import UsageError
from linexport.manifest.map_records import MapPlan
from linexport.maps import accuracy, choose_map
from linexport.maps.attention_samples import HeadSamples, random_samples
from linexport.maps.required_features import Promise, RequiredFeatures, required_features
from linexport.maps.simulated_features import (
    CONFIDENCE,
    Goal,
    SimulatedFeatures,
    allowed_failures,
    simulated_features,
)
from linexport.models import feature_maps
from linexport.models.feature_maps.base import UNBIASED
from linexport.models.feature_maps.favor_flat import FavorFlat
from linexport.models.feature_maps.gaussian import Gaussian
from linexport.report import map_plan

pytestmark = pytest.mark.usefixtures("one_thread")

Cli = Callable[..., Any]
RANDOM = [k for k in feature_maps.kinds() if feature_maps.find_map(k).exactness == UNBIASED]
WIDTHS = {"local": 1, "favor+*local": 1}
CHANCE = 1e-6 / (3 * len(RANDOM))
QUICK = ("favor+", "tensor_sketch")


def given(kind: str, probability: float = 0.8) -> tuple[HeadSamples, Promise]:
    width = WIDTHS.get(kind, 4)
    samples = random_samples(width, 96, 3)
    q, k = accuracy.random_pairs(samples)
    scaled = HeadSamples(
        samples.queries / 2,
        samples.keys / 2,
        samples.values,
        samples.fit_queries / 2,
        samples.fit_keys / 2,
        True,
        4,
        "",
    )
    return scaled, Promise(q[:200] / 2, k[:200] / 2, 0.3, False, probability)


def options_of(kind: str, samples: HeadSamples, found: RequiredFeatures) -> dict[str, Any]:
    """With what a fit has chosen as options, so that draws need no fit of their own."""
    module = feature_maps.make(kind, samples.queries.shape[2], found.options)
    if isinstance(module, Gaussian):
        module.fit(samples.fit_queries, samples.fit_keys)
        return {**found.options, "bandwidth": 1 / float(module.inverse_bandwidth)}
    if isinstance(module, FavorFlat):
        module.fit(samples.fit_queries, samples.fit_keys)
        floor = math.exp(2 * float(module.half_log_floor))
        return {**found.options, "floor": floor, "sharpness": float(module.root_sharpness) ** 2}
    return found.options


def errors(kind: str, options: dict[str, Any], promise: Promise, draws: int) -> np.ndarray:
    """The kernel error of every draw, by its definition."""
    found = []
    for seed in range(draws):
        module = feature_maps.make(kind, promise.queries.shape[1], {**options, "seed": 77 + seed})
        if not found:
            kernel = module.kernel_value(promise.queries, promise.keys)
            size = math.sqrt((kernel**2).mean())
        got = accuracy.products(module, promise.queries, promise.keys)
        found.append(math.sqrt(((got - kernel) ** 2).mean()) / size)
    return np.array(found)


def kept(found: np.ndarray, promise: Promise) -> bool:
    """The promise is not refuted, at ``CHANCE``."""
    successes = int((found <= promise.error).sum())
    return bool(stats.binom.cdf(successes, len(found), promise.probability) >= CHANCE)


@pytest.mark.parametrize(
    ("kind", "draws"),
    [
        *((kind, 100) for kind in QUICK),
        *(pytest.param(kind, 1000, marks=pytest.mark.slow) for kind in RANDOM),
    ],
)
def test_the_promised_probability_holds(kind: str, draws: int) -> None:
    samples, promise = given(kind)
    planned = required_features(kind, samples, promise, 65536)
    assert planned.reason is None and planned.needed is not None
    assert planned.mean_square is not None and planned.mean_square <= promise.mean_square
    found = errors(kind, options_of(kind, samples, planned), promise, draws)
    assert kept(found, promise)
    # Jensen: the mean error is at most the root of the expected square.
    allowed = 6 * found.std() / math.sqrt(draws)
    assert found.mean() <= math.sqrt(planned.mean_square) + allowed


def test_a_promise_that_does_not_hold_is_noticed() -> None:
    samples, promise = given("favor+")
    planned = required_features("favor+", samples, promise, 65536)
    assert planned.needed is not None
    few = {"features": planned.needed // 80}
    assert not kept(errors("favor+", few, promise, 100), promise)


@pytest.mark.parametrize("kind", ["favor+", "tensor_sketch", "laplace", "trigonometric"])
def test_no_fewer_features_keep_the_promise(kind: str) -> None:
    samples, promise = given(kind)
    planned = required_features(kind, samples, promise, 65536)
    assert planned.needed is not None
    step = 1 if kind == "favor+" else 2
    with torch.device("meta"):
        fewer = feature_maps.make(kind, 4, {"features": planned.needed - step})
    assert promise.expected(fewer) > promise.mean_square * (1 - 1e-9)


def test_a_higher_probability_takes_more_features_and_so_does_an_absolute_error() -> None:
    samples, promise = given("laplace")
    sure = Promise(promise.queries, promise.keys, 0.3, False, 0.98)
    absolute = Promise(promise.queries, promise.keys, 0.3, True, 0.8)
    plain, more, other = (
        required_features("laplace", samples, p, 10**6).needed for p in (promise, sure, absolute)
    )
    assert plain is not None and more is not None and other is not None
    assert more == pytest.approx(10 * plain, rel=0.1)
    kernel = feature_maps.make("laplace", 4).kernel_value(promise.queries, promise.keys)
    assert other == pytest.approx(plain * (kernel**2).mean(), rel=0.1)


# By simulation


def goal(quantity: str, kind: str, probability: float) -> tuple[HeadSamples, Promise, Goal]:
    samples, promise = given(kind, probability)
    against = accuracy.reference(samples)
    pairs = promise.queries, promise.keys
    error_of = {
        "output": lambda module: accuracy.output_error(module, against),
        "kernel": lambda module: accuracy.kernel_error(module, *pairs),
    }[quantity]
    return samples, promise, Goal(error_of, promise.error, probability)


def refuted(planned: SimulatedFeatures, kind: str, aim: Goal, draws: int, first: int) -> bool:
    """Return whether draws of their own show, at ``CHANCE``, that a promise does not hold."""
    successes = 0
    for seed in range(first, first + draws):
        module = feature_maps.make(kind, 4, {**planned.options, "seed": seed})
        successes += aim.error_of(module) <= aim.limit
    return bool(stats.binom.cdf(successes, draws, aim.probability) < CHANCE)


@pytest.mark.parametrize(
    ("plans", "draws"), [(3, 100), pytest.param(60, 1000, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("quantity", ["output", "kernel"])
def test_the_promise_of_a_simulation_holds_for_many_plans(
    quantity: str, plans: int, draws: int
) -> None:
    """Each holds with a confidence of 0.999, and is checked with draws that it has not seen."""
    kinds = ("trigonometric", "favor+", "laplace")
    broken, found = 0, []
    for seed in range(plans):
        kind, probability = kinds[seed % 3], (0.8, 0.9)[seed % 2]
        samples, _, aim = goal(quantity, kind, probability)
        planned = simulated_features(kind, samples, aim, 4096, 10_000 * seed)
        assert planned.needed is not None
        failures = planned.draws - planned.kept
        assert failures <= allowed_failures(planned.draws, probability, 1 - CONFIDENCE)
        broken += refuted(planned, kind, aim, draws, 50_000_000)
        found.append(planned.needed)
    # Of so many plans as many as one in a thousand may be broken, and be noticed.
    assert stats.binom.sf(broken - 1, plans, 1 - CONFIDENCE) > 1e-6
    assert max(found) < 400


def test_a_simulation_asks_for_a_fraction_of_what_the_inequality_does() -> None:
    samples, promise, of_kernel = goal("kernel", "favor+", 0.8)
    bounded = required_features("favor+", samples, promise, 65536).needed
    kernel = simulated_features("favor+", samples, of_kernel, 4096, 0).needed
    output = simulated_features("favor+", samples, goal("output", "favor+", 0.8)[2], 4096, 0).needed
    assert bounded is not None and kernel is not None and output is not None
    assert output < kernel / 3 and kernel < bounded / 4
    # An eighth of the features breaks the promise.
    fewer = SimulatedFeatures(output // 8, {"features": output // 8})
    assert refuted(fewer, "favor+", goal("output", "favor+", 0.8)[2], 150, 0)


@pytest.mark.slow
def test_a_simulation_finds_features_where_the_inequality_asks_for_a_billion() -> None:
    """Kernels of wide heads vary by orders of magnitude, of which the output shows little."""
    samples = random_samples(64, 256, 0)
    promise = Promise(*accuracy.random_pairs(samples), 0.1, False, 0.95)
    bounded = required_features("favor+", samples, promise, 4096).needed
    against = accuracy.reference(samples)
    aim = Goal(lambda module: accuracy.output_error(module, against), 0.8, 0.95)
    found = simulated_features("favor+", samples, aim, 4096, 0)
    assert bounded is not None and bounded > 1e8
    assert found.needed is not None and found.needed <= 4096


@pytest.mark.parametrize("probability", [0.5, 0.8, 0.95, 0.99])
@pytest.mark.parametrize("chance", [1e-3, 1e-5])
def test_allowed_failures_are_those_of_clopper_and_pearson(
    probability: float, chance: float
) -> None:
    for draws in (1, 30, 200, 1500):
        failures = allowed_failures(draws, probability, chance)
        for few in (failures, failures + 1):
            successes = draws - few
            lower = stats.beta.ppf(chance, successes, few + 1) if 0 < successes <= draws else 0.0
            shown = bool(lower >= probability * (1 - 1e-9))
            assert few < 0 or shown is (few <= failures)


def test_a_plan_by_simulation_is_of_the_output(simulated: MapPlan) -> None:
    rows = {row.map: row for row in simulated.rows}
    assert simulated.quantity == "output" and simulated.confidence == CONFIDENCE
    favor = rows["favor+"]
    assert favor.needed == favor.features and favor.kept <= favor.simulated
    assert favor.expected_error is None and favor.fits
    assert rows["elu1"].fits and rows["elu1"].output_error <= 0.8
    assert rows["elu1"].simulated is None
    assert rows["identity"].needed is None and "however often" in rows["identity"].reason
    assert "bidirectional only" in rows["softmax_time"].reason


@pytest.fixture(scope="module")
def plan() -> MapPlan:
    maps = ["relu", "elu1", "taylor2", "favor+", "laplace", "pseudo_keys", "softmax_time"]
    return choose_map(
        8,
        64,
        error=0.4,
        probability=0.8,
        method="inequality",
        output_error=0.9,
        maps=maps,
        threads=1,
    )


@pytest.fixture(scope="module")
def simulated() -> MapPlan:
    maps = ["identity", "elu1", "favor+", "softmax_time"]
    return choose_map(8, 64, error=0.8, probability=0.8, maps=maps, threads=1)


def test_the_fastest_that_fits_is_chosen(plan: MapPlan) -> None:
    rows = {row.map: row for row in plan.rows}
    fitting = [row for row in plan.rows if row.fits]
    assert plan.chosen == min(fitting, key=lambda row: row.us_per_token).map
    assert plan.rows[: len(fitting)] == tuple(fitting)
    for row in fitting:
        assert row.needed == row.features and row.reason is None
        assert row.output_error <= 0.9 and row.bytes_per_token > 0
        assert row.state_bytes == 4 * 4 * row.features * 9
    assert rows["taylor2"].expected_error == 0 and rows["taylor2"].fits
    assert rows["favor+"].needed > 4096 == rows["favor+"].features
    assert "the promise takes" in rows["favor+"].reason and rows["favor+"].output_error > 0
    assert "without a theory" in rows["pseudo_keys"].reason and rows["pseudo_keys"].needed is None
    assert "bidirectional only" in rows["softmax_time"].reason


def test_where_none_fits_that_is_said() -> None:
    maps = ["elu1", "favor+"]
    found = choose_map(8, 64, error=0.01, method="inequality", maps=maps, threads=1)
    assert found.chosen is None and not any(row.fits for row in found.rows)
    assert map_plan.headline(found).startswith("None: no map fits. The nearest")
    assert "from softmax attention" in next(r for r in found.rows if r.map == "elu1").reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"error": 0.0}, "The error is 0; expected a number above 0"),
        ({"error": float("nan")}, "The error is nan"),
        ({"output_error": -1.0, "quantity": "kernel"}, "The output error is -1"),
        ({"probability": 1.0}, "The probability is 1; expected between 0 and 1"),
        ({"most_features": 1}, "At most 1 features"),
        ({"maps": ["favour"]}, "Did you mean 'favor"),
        ({"quantity": "kernels"}, "The quantity is 'kernels'; expected output or kernel"),
        ({"method": "markov"}, "The method is 'markov'; expected simulation or inequality"),
        ({"method": "inequality", "quantity": "output"}, "bounds the error of the kernel"),
        ({"absolute": True}, "belong to a promise on the kernel"),
        ({"output_error": 0.5}, "belong to a promise on the kernel"),
        ({"probability": 0.9999}, "a simulation shows 0.999 at most"),
        ({"length": 0}, "Length 0"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose_map(8, **{"length": 64, **arguments})


@pytest.mark.services
def test_the_command(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.manual_seed(0)
    models.save(models.build("language_model", {"dim": 16, "num_heads": 2, "layers": 1}), path)
    common = ("maps", "choose", "--data", path, "--length", 32, "--threads", 1)
    done = cli(*common, "--error", 0.9, "--maps", "elu1,favor+")
    assert done.code == 0
    assert "is the cheapest that fits" in done.out.replace("\n", " ")
    found = cli(*common, "--error", 1e-6, "--maps", "elu1", "--json")
    assert found.code == 3
    assert found.json()["chosen"] is None and found.json()["kind"] == "map_plan"


@pytest.mark.parametrize("method", ["plan", "simulated"])
def test_the_plan_fits_eighty_columns(method: str, request: pytest.FixtureRequest) -> None:
    from rich.console import Console

    plan = request.getfixturevalue(method)
    console = Console(width=80, record=True, file=io.StringIO())
    map_plan.print_plan(plan, console)
    text = console.export_text()
    assert "…" not in text and all(len(line) <= 80 for line in text.splitlines())
    assert {row.map for row in plan.rows} <= set(text.split()) | {"taylor2"}
    assert asdict(plan)["kind"] == "map_plan"
