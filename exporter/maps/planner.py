"""The cheapest map whose kernel error is kept with a probability, or none.

Every map gets as many features as the promise takes (``required_features``). What that costs and
how near its attention comes to softmax is then measured as ``compare_maps`` does. A map fits if the
promise takes no more features than allowed and the measured output error is within its limit: a
promise on its own kernel says nothing of maps whose kernel is another than softmax's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
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
from linexport.models import feature_maps
from linexport.system.progress import Progress, Silent

MOST_FEATURES = 4096


def choose_map(
    d: int | None = None,
    length: int = LENGTH,
    *,
    error: float = 0.1,
    probability: float = 0.95,
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
        error: largest kernel error, root mean square over pairs of a query and a key.
        probability: of no larger one, over the draws of the map.
        absolute: the error is not relative to the kernel's root mean square.
        output_error: largest measured error of attention's output from softmax's, relative; None:
            ``error``.
        most_features: largest M that may be chosen.
        data: a model, as for ``linexport.convert``, whose queries and keys to use.
        inputs: ``.npz`` of that model's arguments; None: random ones.
        maps: their names; None: all.
        threads: of the timed sessions, 0 for ONNX Runtime's choice.
        seed: of random queries, keys and maps.
        progress: told the stages.

    Returns:
        ``chosen`` names the fastest map that fits, or is None; ``rows`` has every map with what
        the promise takes, its measured errors and costs, and the ``reason`` why it does not fit.

    Raises:
        UsageError: an unknown map, numbers out of range, or a model without such layers.
    """
    output_error = error if output_error is None else output_error
    _check(error, probability, output_error, most_features)
    kinds = [feature_maps.find_map(kind).kind for kind in maps or feature_maps.kinds()]
    shown = progress or Silent()
    with shown.stage("sample"):
        samples = take_samples(d, length, data, inputs, seed)
        against = accuracy.reference(samples)
        promise = Promise(*accuracy.random_pairs(samples), error, absolute, probability)
    with shown.stage("plan"):
        rows = [_row(kind, promise, against, most_features, seed) for kind in dict.fromkeys(kinds)]
    # Only what the promise allows is worth its measurement.
    allowed = [row for row in rows if row.reason is None]
    if allowed:
        measured = {row.map: row for row in with_costs(allowed, samples, threads, shown)}
        rows = [_judged(measured.get(row.map, row), output_error) for row in rows]
    rows.sort(key=lambda row: (not row.fits, row.us_per_token or float("inf"), row.map))
    return MapPlan(
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


def _row(
    kind: str,
    promise: Promise,
    against: accuracy.SoftmaxReference,
    most: int,
    seed: int,
) -> PlanRow:
    """Plan one map: what the promise takes, its errors with that, and a reason if too much."""
    try:
        found = required_features(kind, against.samples, promise, most)
    except UsageError as error:
        found_row = judge_choice(MapChoice(kind, {}), against, seed)
        return PlanRow(**{**asdict(found_row), "reason": found_row.reason or str(error)})
    judged = judge_choice(MapChoice(kind, found.options), against, seed)
    reason = judged.reason or found.reason
    if found.needed is not None and found.needed > most and found.reason is None:
        reason = f"it has {found.needed:,} features"
    mean_square = found.mean_square
    return PlanRow(
        **{**asdict(judged), "reason": reason},
        needed=found.needed,
        expected_error=None if mean_square is None else mean_square**0.5,
    )


def _judged(row: PlanRow, output_error: float) -> PlanRow:
    """The row with whether it fits, and the reason why it does not."""
    if row.reason or row.us_per_token is None:
        return row
    assert row.output_error is not None
    if row.output_error > output_error:
        return replace(row, reason=f"its output is {row.output_error:.2g} from softmax attention")
    return replace(row, fits=True)
