"""Is it worth it? One sentence, and whether the linear form is to be used."""

from __future__ import annotations

from linexport.manifest.linearization_records import FormCosts, Status
from linexport.manifest.proof import MetricRecord


def verdict(
    costs: FormCosts, metric: MetricRecord | None, max_drop: float | None
) -> tuple[Status, str]:
    """Return ``status`` and ``verdict`` of a report: why not, or where it wins.

    Args:
        costs: as measured.
        metric: the score, before and after.
        max_drop: by how much it may get worse; None: by any amount.
    """
    against = [*_too_much_lost(metric, max_drop), *_never_faster(costs)]
    if against:
        return "declined", f"No: {'; and '.join(against)}."
    words = [_faster(costs), _change(metric)]
    return "ok", f"{'; '.join(w for w in words if w) or 'Converted; nothing was measured'}."


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
    lengths = f"{rows[0].length:,} to {last.length:,}"
    return [
        f"the linear form is not faster at the lengths measured, {lengths}: at the longest {times}"
    ]


def _faster(costs: FormCosts) -> str:
    rows = costs.latency
    if not rows or costs.crossover is None:
        return ""
    last = rows[-1]
    times = last.best_original_ms / last.linear_ms
    if len(rows) == 1:
        return f"The linear form is {times:.1f} times faster"
    return (
        f"The linear form is faster at lengths from {costs.crossover:,} on, "
        f"{times:.1f} times at {last.length:,}"
    )


def _change(metric: MetricRecord | None) -> str:
    if metric is None:
        return ""
    return f"{metric.name} goes from {metric.before:.4g} to {metric.after:.4g}"
