"""Parts of the manifest that were measured -> tables of ready text, and series for charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from linexport.report.charts import Point, Series
from linexport.report.tables import Cell, Table, build, columns
from linexport.report.text import (
    ABSENT,
    amount,
    count,
    error,
    exact,
    items,
    mapping,
    number,
    objects,
    plain,
    positive,
    split,
    times,
)

NAMES = {"artifact": "artifact", "plain_export": "plain export", "pytorch": "PyTorch"}


def cases(parity: Mapping[str, Any]) -> Table | None:
    """Every comparison with the original; one that failed is marked."""
    labels = ["Case", "#Batch", "#Length", "#Magnitude", "Reference", "#Max relative"]
    labels += ["#Max absolute", "Worst element", "NaN", "Inf", "Result"]
    rows = [_case(case) for case in objects(parity.get("cases"))]
    return build("Parity, case by case", labels, rows)


def _case(case: Mapping[str, Any]) -> list[Cell]:
    worst = mapping(case.get("worst"))
    values = f"{exact(worst.get('expected'))} → {exact(worst.get('got'))}" if worst else ABSENT
    index = f"[{', '.join(map(str, items(worst.get('index'))))}]" if worst else ""
    passed = case.get("passed")
    result = Cell("✓ passed", tone="good") if passed else Cell("✗ failed", tone="bad")
    return [
        Cell(
            plain(case.get("name")), f"{plain(case.get('output'))}, seed {plain(case.get('seed'))}"
        ),
        Cell(count(case.get("batch"))),
        Cell(count(case.get("length"))),
        Cell(count(case.get("magnitude"))),
        Cell(plain(case.get("reference"))),
        Cell(error(case.get("max_relative_error")), tone="strong"),
        Cell(error(case.get("max_absolute_error"))),
        Cell(values, index, tone="fixed"),
        _sides(case.get("nan")),
        _sides(case.get("inf")),
        Cell(ABSENT, tone="open") if passed is None else result,
    ]


def _sides(value: Any) -> Cell:
    sides = mapping(value)
    if not sides:
        return Cell(ABSENT, tone="open")
    expected, got = sides.get("expected"), sides.get("got")
    return Cell(f"{count(expected)} → {count(got)}", tone="fixed" if expected == got else "bad")


def bins(histogram: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Edges and counts, or two empty lists where they do not fit together."""
    edges = [number(edge) for edge in items(histogram.get("log10_edges"))]
    counts = [number(much) for much in items(histogram.get("counts"))]
    whole = (
        [edge for edge in edges if edge is not None],
        [much for much in counts if much is not None],
    )
    if None in edges or None in counts or len(edges) != len(counts) + 1:
        return [], []
    return whole


def histogram(edges: Sequence[float], counts: Sequence[float]) -> Table | None:
    """The bins that hold anything, and those between."""
    filled = [index for index, much in enumerate(counts) if much > 0]
    inside = range(filled[0], filled[-1] + 1) if filled else range(0)
    rows = [
        [Cell(f"{10 ** edges[i]:.1e}"), Cell(f"{10 ** edges[i + 1]:.1e}"), Cell(count(counts[i]))]
        for i in inside
    ]
    return build("Elements by relative error", ["#From", "#To", "#Elements"], rows, even=True)


def splits(streaming: Mapping[str, Any]) -> Table | None:
    """The ways in which one sequence was cut."""
    rows = []
    for one in items(streaming.get("splits")):
        sizes = items(one)
        total = sum(number(size) or 0.0 for size in sizes)
        rows.append([Cell(split(sizes)), Cell(count(total)), Cell(count(len(sizes)))])
    return build("Splits tried", ["Pieces, in tokens", "#Tokens", "#Calls"], rows)


def by_batch(rows: Any) -> dict[str, list[Mapping[str, Any]]]:
    """Rows grouped by batch size, each group in order of length."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(objects(rows), key=lambda row: number(row.get("length")) or 0.0):
        groups.setdefault(count(row.get("batch")), []).append(row)
    return groups


def series(rows: Sequence[Mapping[str, Any]]) -> list[Series]:
    """One line a competitor, through the lengths at which it was measured."""
    found = []
    for key, name in NAMES.items():
        points = []
        for row in rows:
            x, p50 = positive(row.get("length")), positive(row.get(f"{key}_ms"))
            if x is not None and p50 is not None:
                points.append(Point(x, p50, positive(row.get(f"{key}_p90_ms"))))
        found.append(Series(name, tuple(points)))
    return found


def latency(rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """Median and ninetieth percentile of each competitor by length, and speed-ups."""
    if not rows:
        return None
    labels = ["#Length", "#p50", "#p90", "#p50", "#p90", "#Speedup", "#p50", "#p90", "#Speedup"]
    groups = (("", 1), ("Artifact, ms", 2), ("Plain export, ms", 3), ("PyTorch eager, ms", 3))
    body = [(Cell(count(row.get("length"))), *_competitors(row)) for row in rows]
    return Table("Latency by length", columns(*labels), tuple(body), groups, even=True)


def _competitors(row: Mapping[str, Any]) -> list[Cell]:
    cells: list[Cell] = []
    for key in NAMES:
        p50, span = row.get(f"{key}_ms"), 2 if key == "artifact" else 3
        if number(p50) is None:
            cells.append(_missing(row, key, span))
            continue
        tone = "strong" if key == "artifact" else ""
        cells.append(Cell(amount(p50), tone=tone))
        p90 = row.get(f"{key}_p90_ms")
        cells.append(Cell(ABSENT, tone="open") if p90 is None else Cell(amount(p90)))
        if key != "artifact":
            cells.append(Cell(times(p50, row.get("artifact_ms")), tone="strong"))
    return cells


def _missing(row: Mapping[str, Any], key: str, span: int = 1) -> Cell:
    reason = mapping(row.get("reasons")).get(key)
    return Cell(f"could not run: {reason}" if reason else ABSENT, span=span, tone="open")


def decode(step: Mapping[str, Any]) -> Table | None:
    """The time of one more token, a row a competitor."""
    if not step:
        return None
    rows: list[list[Cell]] = []
    for key, name in NAMES.items():
        p50, p90 = step.get(f"{key}_ms"), step.get(f"{key}_p90_ms")
        if number(p50) is None:
            rows.append([Cell(name), _missing(step, key, 3)])
            continue
        spread = Cell(ABSENT, tone="open") if p90 is None else Cell(amount(p90))
        gain = "" if key == "artifact" else times(p50, step.get("artifact_ms"))
        rows.append([Cell(name), Cell(amount(p50), tone="strong"), spread, Cell(gain)])
    labels = ["Competitor", "#p50, ms", "#p90, ms", "#Speedup of the artifact"]
    return build("One decode step", labels, rows, even=True)


def memory(value: Any) -> Table | None:
    """Peak megabytes of each competitor by length."""
    rows = []
    for row in objects(value):
        cells = [Cell(count(row.get("length")))]
        for key in ("io", *NAMES):
            known = number(row.get(f"{key}_mb")) is not None
            tone = "strong" if key == "artifact" else ""
            full = Cell(amount(row.get(f"{key}_mb")), tone=tone)
            cells.append(full if known else _missing(row, key))
        rows.append(cells)
    labels = ["#Length", "#Inputs and outputs, MB", "#Artifact, MB", "#Plain export, MB"]
    return build("Peak memory", [*labels, "#PyTorch, MB"], rows, even=True)
