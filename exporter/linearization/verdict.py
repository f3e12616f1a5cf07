"""Is it worth it? One sentence, and whether the linear form is to be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OK, DECLINED = "ok", "declined"


def verdict(report: Mapping[str, Any], max_drop: float | None) -> tuple[str, str]:
    """``status`` and ``verdict`` of a report: why not, or where it wins.

    Args:
        report: with ``metric``, ``latency`` and ``crossover``.
        max_drop: by how much the metric may get worse; None: by any amount.
    """
    against = [*_too_much_lost(report, max_drop), *_never_faster(report)]
    if against:
        return DECLINED, f"No: {'; and '.join(against)}."
    words = [_faster(report), _metric(report)]
    return OK, f"{'; '.join(w for w in words if w) or 'Converted; nothing was measured'}."


def _too_much_lost(report: Mapping[str, Any], max_drop: float | None) -> list[str]:
    metric = report["metric"]
    if metric is None or max_drop is None or metric["drop"] <= max_drop:
        return []
    return [
        f"{metric['name']} falls from {metric['before']:.4g} to {metric['after']:.4g}, more than "
        f"the {max_drop:g} allowed"
        if not metric["lower_is_better"]
        else f"{metric['name']} rises from {metric['before']:.4g} to {metric['after']:.4g}, more "
        f"than the {max_drop:g} allowed"
    ]


def _never_faster(report: Mapping[str, Any]) -> list[str]:
    rows = report["latency"]
    if not rows or report["crossover"] is not None:
        return []
    last = rows[-1]
    best = min(last["original_ms"], last["original_pytorch_ms"])
    times = f"it takes {last['linear_ms']:.3g} ms and the original {best:.3g} ms"
    if len(rows) == 1:
        return [f"the linear form is not faster: {times}"]
    lengths = f"{rows[0]['length']:,} to {last['length']:,}"
    return [
        f"the linear form is not faster at the lengths measured, {lengths}: at the longest {times}"
    ]


def _faster(report: Mapping[str, Any]) -> str:
    if report["crossover"] is None:
        return ""
    last = report["latency"][-1]
    times = min(last["original_ms"], last["original_pytorch_ms"]) / last["linear_ms"]
    if len(report["latency"]) == 1:
        return f"The linear form is {times:.1f} times faster"
    return (
        f"The linear form is faster at lengths from {report['crossover']:,} on, "
        f"{times:.1f} times at {last['length']:,}"
    )


def _metric(report: Mapping[str, Any]) -> str:
    metric = report["metric"]
    if metric is None:
        return ""
    return f"{metric['name']} goes from {metric['before']:.4g} to {metric['after']:.4g}"
