"""Is it worth it? One sentence: why not, or where it wins; the errors stand in both.

Three after a search: what became of the layers, what that costs the task, and what it gains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from linexport.linearization import quality
from linexport.manifest.linearization_records import (
    SOFTMAX,
    AttentionRow,
    FeedForwardRow,
    FormCosts,
    SearchPoint,
    SearchRecord,
    Status,
)
from linexport.manifest.proof import MetricRecord


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Numbers that a verdict rests on, as in the report.

    Attributes:
        layers: every call of softmax attention.
        feed_forward: every feed-forward layer that was looked at.
        output_error: of the whole model.
        uniform_output_error: if the replaced layers attended to all keys alike.
        costs: as measured.
        metric: the score, before and after.
        max_drop: by how much it may get worse; None: by any amount.
        forced: errors and costs of layers decide nothing.
        search: by which the forms were found; the loss of the task decides then.
    """

    layers: Sequence[AttentionRow] = ()
    feed_forward: Sequence[FeedForwardRow] = ()
    output_error: float = 0.0
    uniform_output_error: float | None = None
    costs: FormCosts = field(default_factory=FormCosts)
    metric: MetricRecord | None = None
    max_drop: float | None = None
    forced: bool = False
    search: SearchRecord | None = None


def verdict(found: Measurements) -> tuple[Status, str]:
    """Return ``status`` and ``verdict`` of a report."""
    if found.search is not None:
        return _searched(found.search, found)
    against = [*_too_much_lost(found.metric, found.max_drop), *_never_faster(found.costs)]
    if not found.forced:
        against = [*_no_better(found), *_dearer(found), *against]
    errors = [*_attention(found.layers), *_dense(found.feed_forward)]
    if against:
        gain = [_faster(found.costs)] if found.costs.crossover is not None else []
        measured = "; ".join([*errors, *gain])
        return "declined", f"No: {'; and '.join(against)}.{f' {measured}.' if measured else ''}"
    return "ok", f"{'; '.join([*errors, _faster(found.costs), *_change(found.metric)])}."


def _searched(search: SearchRecord, found: Measurements) -> tuple[Status, str]:
    chosen = next(point for point in search.points if point.chosen)
    against = _never_faster(found.costs)
    linear = [form for form in chosen.forms if form != SOFTMAX]
    rows = f"{search.confirm_rows:,} rows of {search.length:,} that the search never saw"
    if not linear:
        return "declined", (
            f"No: no layer can be replaced within a drop of {search.max_drop:g} in "
            f"{search.loss}. {_nearest(search)} {_spent(search)}"
        )
    counted = Counter(linear)
    kinds = ", ".join(f"{name} in {count}" for name, count in counted.most_common())
    first = f"{len(linear)} of {len(chosen.forms)} layers are linear: {kinds}"
    change = "; ".join(_change(found.metric))
    second = (
        f"On {rows}, {change}, a drop of {search.drop:.3g} and of at most {search.bound:.3g} with "
        f"a confidence of {search.confidence:.0%}, where {search.max_drop:g} is allowed"
    )
    third = f"{_gains(search, chosen)}; {against[0] if against else _faster(found.costs)}"
    status: Status = "declined" if against else "ok"
    return status, f"{'No: ' if against else ''}{first}. {second}. {third}."


def _nearest(search: SearchRecord) -> str:
    """The point that came nearest to what is allowed."""
    tried = search.points[1:]
    if not tried:
        return "No form that saves anything was judged."
    best = min(tried, key=lambda point: point.bound)
    linear = sum(form != SOFTMAX for form in best.forms)
    return (
        f"With {linear} of {len(best.forms)} layers linear, it drops by {best.drop:.3g} on the "
        f"rows of the search, and by at most {best.bound:.3g}."
    )


def _spent(search: SearchRecord) -> str:
    if search.exhausted:
        return f"The {search.minutes:g} minutes were used up: --time-budget gives more."
    return f"The search ended by itself after {search.seconds:.0f} seconds."


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _gains(search: SearchRecord, chosen: SearchPoint) -> str:
    """Time of all attention at the longest length, and bytes of states, over those of softmax."""
    softmax = search.points[0]
    before, after = softmax.times[-1], chosen.times[-1]
    how = "computed" if before.computed or after.computed else "measured"
    gain = (
        f"Attention over {before.length:,} tokens takes {_ms(after.milliseconds)} ms instead of "
        f"{_ms(before.milliseconds)}, {how} by layer"
    )
    if softmax.state_bytes:
        gain += f", and states {chosen.state_bytes / softmax.state_bytes:.1%} of the bytes"
    return gain


def _no_better(found: Measurements) -> list[str]:
    """No form is better than the mean of the values; or all of them together are not."""
    replaced = quality.replaced(found.layers)
    refused = quality.judged_no_better(found.layers)
    if refused and not replaced:
        return ["no layer's linear form is better than the mean of its values"]
    alike = found.uniform_output_error
    if replaced and alike is not None and not found.output_error < alike:
        return [
            f"the outputs are {found.output_error:.3g} off, and {alike:.3g} if the same layers "
            "attend to all keys alike"
        ]
    return []


def _dearer(found: Measurements) -> list[str]:
    """No feed-forward layer pays: in time, or in multiply-adds where times were not measured."""
    made = [row for row in found.feed_forward if row.pays is not None]
    if not made or any(row.pays for row in made):
        return []
    if found.costs.crossover is not None and not quality.replaced(found.layers):
        return []  # Only these layers differ, and the model is faster.
    if any(row.times is None for row in made):
        return ["no feed-forward layer costs less than the one it replaces"]
    return ["no feed-forward layer is faster than the one it replaces"]


def _attention(layers: Sequence[AttentionRow]) -> list[str]:
    """The errors of replaced layers; of those that were refused, where there are no others."""
    replaced, refused = quality.replaced(layers), quality.judged_no_better(layers)
    pairs = [pair for row in replaced or refused if (pair := row.judged_errors)]
    if not pairs:
        return []
    forms, alike = (_range(values) for values in zip(*pairs, strict=True))
    name = layers[0].name
    if replaced:
        several = f"{len(replaced)} of {len(layers)} layers are linear"
        found = [f"{name} is linear" if len(layers) == 1 else several]
    else:
        found = [f"{name} is kept" if len(layers) == 1 else "all layers are kept"]
    found[0] += f", error {forms} where attending to all keys alike has {alike}"
    if replaced and refused:
        found.append(f"no better than that, softmax is kept in {_names(refused)}")
    worse = [row for row in replaced if quality.no_better(row)]
    if worse:
        found.append(f"no better than that, but forced: {_names(worse)}")
    return found


def _names(rows: Sequence[AttentionRow]) -> str:
    return ", ".join(row.name for row in rows)


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _dense(rows: Sequence[FeedForwardRow]) -> list[str]:
    """Costs and errors of feed-forward layers."""
    made = [row for row in rows if row.cost_factor is not None]
    if not made:
        return []
    named = f"{len(made)} feed-forward layers cost"
    if len(made) == 1:
        after = ", with the layer after it" if made[0].folded else ""
        named = f"1 feed-forward layer ({made[0].name}{after}) costs"
    costs = _range([row.cost_factor for row in made if row.cost_factor is not None])
    error = _range([row.relative_error for row in made if row.relative_error is not None])
    found = f"{named} {costs} times the multiply-adds of before{_times(made)}, error {error}"
    return [found]


def _times(rows: Sequence[FeedForwardRow]) -> str:
    """Times of the layers with few and with many rows at once, over those of before."""
    timed = [row.times for row in rows if row.times]
    if not timed:
        return ""
    many, few = (_range([times[at].factor for times in timed]) for at in (-1, 0))
    first, last = timed[0][0].rows, timed[0][-1].rows
    return f", and {many} times the time for {last:,} rows at once, {few} for {first:,}"


def _too_much_lost(metric: MetricRecord | None, max_drop: float | None) -> list[str]:
    if metric is None or max_drop is None or metric.drop <= max_drop:
        return []
    moves = "rises" if metric.lower_is_better else "falls"
    return [
        f"{metric.name} {moves} from {metric.before:.4g} to {metric.after:.4g}, more than the "
        f"{max_drop:g} allowed"
    ]


def _never_faster(costs: FormCosts) -> list[str]:
    rows = costs.latency
    if not rows or costs.crossover is not None:
        return []
    last = rows[-1]
    times = f"it takes {last.linear_ms:.3g} ms and the original {last.best_original_ms:.3g} ms"
    if len(rows) == 1:
        return [f"the linear form is not faster: {times}"]
    wins = [f"{row.length:,}" for row in rows if row.linear_ms < row.best_original_ms]
    if wins:
        there = f"faster at {', '.join(wins)} {costs.over}, but not at {last.length:,}"
        return [f"the linear form is {there}, where {times}"]
    span = f"from {rows[0].length:,} to {last.length:,} {costs.over}"
    return [f"the linear form is not faster {span}: at {last.length:,} {times}"]


def _faster(costs: FormCosts) -> str:
    rows = costs.latency
    if not rows or costs.crossover is None:
        return "its speed was not measured"
    last = rows[-1]
    times = last.best_original_ms / last.linear_ms
    if len(rows) == 1:
        return f"the linear form is {times:.1f} times faster"
    return (
        f"the linear form is faster from {costs.crossover:,} {costs.over} on, "
        f"{times:.1f} times at {last.length:,}"
    )


def _change(metric: MetricRecord | None) -> list[str]:
    if metric is None:
        return []
    return [f"{metric.name} goes from {metric.before:.4g} to {metric.after:.4g}"]
