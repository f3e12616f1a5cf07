"""The cheapest map that keeps an error with a probability, or none.

Every map gets as many features as the promise takes, by one of two methods:

    simulation    draws of the map, on the given queries and keys   ``simulated_features``
    inequality    Markov's, from the variance of the kernel         ``required_features``

A simulation takes the error of attention's output from softmax's, or that of the map's own kernel;
the inequality bounds the latter. What the features cost and how near attention comes to softmax is
then measured as ``compare_maps`` does. A map fits if the promise takes no more features than
allowed and, where it is on the kernel, the measured output error is within its limit: a promise on
its own kernel says nothing of maps whose kernel is another than softmax's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from linexport.errors import UsageError
from linexport.manifest.map_records import MapPlan, PlanRow
from linexport.maps import accuracy
from linexport.maps.comparison import (
    LENGTH,
    MapChoice,
    judge_choice,
    measured_on,
    take_samples,
    with_costs,
)
from linexport.maps.required_features import Promise, required_features
from linexport.maps.simulated_features import CONFIDENCE, Goal, simulated_features
from linexport.models import feature_maps
from linexport.models.feature_maps import FeatureMap
from linexport.models.feature_maps.base import FITTED
from linexport.system.json_object import JsonObject
from linexport.system.progress import Progress, Silent

MOST_FEATURES = 4096

QUANTITIES = ("output", "kernel")
METHODS = ("simulation", "inequality")

MOST_PROBABLE = 0.999
"""A simulation of a higher probability takes more than 10,000 draws."""


def choose_map(
    d: int | None = None,
    length: int = LENGTH,
    *,
    error: float = 0.1,
    probability: float = 0.95,
    quantity: str | None = None,
    method: str = "simulation",
    absolute: bool = False,
    output_error: float | None = None,
    most_features: int = MOST_FEATURES,
    data: str | Path | None = None,
    inputs: str | Path | None = None,
    maps: Sequence[str] | None = None,
    threads: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> MapPlan:
    """Plan the number of features of every map, and choose the cheapest that fits.

    Args:
        d: head width of random queries and keys, 64 by default; of a model it is its own.
        length: tokens.
        error: the largest, relative.
        probability: of no larger one, over the draws of the map.
        quantity: what the error is of: "output" of attention, relative to softmax's, or "kernel",
            root mean square over pairs of a query and a key; None: what the method is for.
        method: "simulation" draws each map until the promise is shown with a confidence of 0.999;
            "inequality" bounds the kernel error by its variance, with many more features.
        absolute: a kernel error is not relative to the kernel's root mean square.
        output_error: largest measured error of attention's output from softmax's, relative, where
            the promise is on the kernel; None: ``error``.
        most_features: largest M that may be chosen.
        data: a model, as for ``linexport.convert``, whose queries and keys to use.
        inputs: ``.npz`` of that model's arguments; None: random ones.
        maps: their names; None: all.
        threads: of the timed sessions, 0 for ONNX Runtime's choice.
        seed: of random queries, keys and maps.
        progress: called with the stages.

    Returns:
        ``chosen`` names the fastest map that fits, or is None; ``rows`` has every map with what
        the promise takes, its measured errors and costs, and the ``reason`` why it does not fit.

    Raises:
        UsageError: an unknown map, numbers out of range, or a model without such layers.
    """
    quantity = quantity or ("output" if method == "simulation" else "kernel")
    _check_method(quantity, method, probability, absolute or output_error is not None)
    output_error = error if output_error is None else output_error
    _check(error, probability, output_error, most_features)
    kinds = [feature_maps.find_map(kind).kind for kind in maps or feature_maps.kinds()]
    shown = progress or Silent()
    with shown.stage("sample"):
        samples = take_samples(d, length, data, inputs, seed)
        against = accuracy.reference(samples)
        promise = Promise(*accuracy.random_pairs(samples), error, absolute, probability)
        planner = _Planner(promise, against, most_features, quantity, method, seed)
    with shown.stage("plan"):
        rows = [planner.row(kind) for kind in dict.fromkeys(kinds)]
    # Only what the promise allows is worth its measurement.
    allowed = [row for row in rows if row.reason is None]
    if allowed:
        measured = {row.map: row for row in with_costs(allowed, samples, threads, shown)}
        # A promise on the output is shown by more draws than are measured here.
        limit = output_error if quantity == "kernel" else float("inf")
        rows = [_judged(measured.get(row.map, row), limit) for row in rows]
    rows.sort(key=lambda row: (not row.fits, row.us_per_token or float("inf"), row.map))
    return MapPlan(
        quantity=quantity,
        method=method,
        confidence=CONFIDENCE if method == "simulation" else None,
        error=error,
        absolute=absolute,
        probability=probability,
        output_error=output_error,
        most_features=most_features,
        pairs=len(promise.queries),
        rows=tuple(rows),
        chosen=rows[0].map if rows[0].fits else None,
        **measured_on(against, threads, seed),
    )


def _check(error: float, probability: float, output_error: float, most_features: int) -> None:
    for name, value in (("error", error), ("output error", output_error)):
        if not 0 < value < float("inf"):
            raise UsageError(f"The {name} is {value:g}; expected a number above 0, such as 0.1.")
    if not 0 < probability < 1:
        raise UsageError(f"The probability is {probability:g}; expected between 0 and 1.")
    if most_features < 2:
        raise UsageError(f"At most {most_features} features; expected 2 or more.")


def _check_method(quantity: str, method: str, probability: float, of_kernels: bool) -> None:
    for name, value, known in (("quantity", quantity, QUANTITIES), ("method", method, METHODS)):
        if value not in known:
            raise UsageError(f"The {name} is {value!r}; expected {' or '.join(known)}.")
    if method == "inequality" and quantity != "kernel":
        raise UsageError(
            "The inequality bounds the error of the kernel, not of the output. Choose the kernel "
            "as the quantity, or simulation as the method."
        )
    if quantity == "output" and of_kernels:
        raise UsageError(
            "An absolute error and a limit of the output error belong to a promise on the kernel. "
            "Choose the kernel as the quantity, or leave them out."
        )
    if method == "simulation" and MOST_PROBABLE < probability < 1:
        raise UsageError(
            f"The probability is {probability:g}; a simulation shows {MOST_PROBABLE:g} at most. "
            "Take the inequality as the method for more."
        )


@dataclass(frozen=True)
class _Planner:
    """Plans one map after another.

    Attributes:
        promise: on pairs of queries and keys.
        against: softmax attention.
        most: features that are allowed.
        quantity, method: see ``choose_map``.
        seed: of the draws.
    """

    promise: Promise
    against: accuracy.SoftmaxReference
    most: int
    quantity: str
    method: str
    seed: int

    def row(self, kind: str) -> PlanRow:
        """Plan one map: what the promise takes, its errors with that, and a reason if too much."""
        found = feature_maps.find_map(kind)
        if found.over_time and self.against.samples.causal:
            return self._measured(kind, {}, None)
        try:
            return self._bounded(kind) if self.method == "inequality" else self._simulated(kind)
        except UsageError as error:
            return self._measured(kind, {}, str(error))

    def _measured(self, kind: str, options: JsonObject, reason: str | None) -> PlanRow:
        judged = judge_choice(MapChoice(kind, options), self.against, self.seed)
        return PlanRow(**{**asdict(judged), "reason": judged.reason or reason})

    def _bounded(self, kind: str) -> PlanRow:
        found = required_features(kind, self.against.samples, self.promise, self.most)
        reason = found.reason
        if found.needed is not None and found.needed > self.most and reason is None:
            reason = f"it has {found.needed:,} features"
        mean_square = found.mean_square
        return replace(
            self._measured(kind, found.options, reason),
            needed=found.needed,
            expected_error=None if mean_square is None else mean_square**0.5,
        )

    def _simulated(self, kind: str) -> PlanRow:
        samples, promise = self.against.samples, self.promise
        if self.quantity == "kernel" and feature_maps.find_map(kind).exactness == FITTED:
            why = "fitted to samples: its kernel is its own, and not one that it is to be near"
            return self._measured(kind, {}, why)
        pairs = promise.queries, promise.keys, promise.absolute
        error_of: Callable[[FeatureMap], float] = {
            "output": lambda module: accuracy.output_error(module, self.against),
            "kernel": lambda module: accuracy.kernel_error(module, *pairs),
        }[self.quantity]
        goal = Goal(error_of, promise.error, promise.probability)
        found = simulated_features(kind, samples, goal, self.most, self.seed)
        reason = found.reason
        if found.needed is not None and found.needed > self.most and reason is None:
            reason = f"it has {found.needed:,} features"
        return replace(
            self._measured(kind, found.options, reason),
            needed=found.needed,
            simulated=found.draws or None,
            kept=found.kept if found.draws else None,
        )


def _judged(row: PlanRow, output_error: float) -> PlanRow:
    """The row with whether it fits, and the reason why it does not."""
    if row.reason or row.us_per_token is None:
        return row
    assert row.output_error is not None
    if row.output_error > output_error:
        return replace(row, reason=f"its output is {row.output_error:.2g} from softmax attention")
    return replace(row, fits=True)
