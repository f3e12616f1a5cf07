"""Floors of the cases, and the table of their times."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gpu.case import Case

COPY = 4.3e12
"""Bytes a second of a copy on an H200, measured: floors where no GPU is at hand."""

HEADER = """| case | floor, ms | time, ms | times the floor | wanted | fla, ms | softmax, ms |
|---|---|---|---|---|---|---|"""


def roofline(case: Case, bytes_per_second: float) -> dict[str, Any]:
    """A case with the least time it can take, and no time yet."""
    size = case.bytes()
    floor = size / bytes_per_second * 1000
    return {**asdict(case), "bytes": size, "floor_ms": floor, "ms": None, "ratio_to_floor": None}


def line(row: dict[str, Any]) -> str:
    """A row of the table, in Markdown."""
    target = "" if row["target"] is None else f"{row['target']:.1f}"
    times = [_number(row[n], d) for n, d in (("floor_ms", 3), ("ms", 3), ("ratio_to_floor", 2))]
    peers = [f"{row[p]:.3f}" if row.get(p) else "" for p in ("fla_ms", "softmax_ms")]
    return f"| {' | '.join([row['name'], *times, target, *peers])} |"


def _number(value: float | None, digits: int) -> str:
    return "unmeasured" if value is None else f"{value:.{digits}f}"
