"""Parts of the manifest that were measured -> tables of ready text, and series for charts."""

from __future__ import annotations

from collections.abc import Sequence

from linexport.manifest.measured import DecodeRecord, LatencyRow, MemoryRow
from linexport.manifest.proof import CaseRecord, CountRecord, ParityRecord, StreamingRecord
from linexport.report.length_chart import Point, Series
from linexport.report.tables import Cell, Table, headings, make_table
from linexport.report.text import (
    ABSENT,
    amount,
    count,
    error,
    exact,
    format_speedup,
    positive,
    split,
)

NAMES = {"artifact": "artifact", "plain_export": "plain export", "pytorch": "PyTorch"}


def cases(parity: ParityRecord) -> Table | None:
    """Every comparison with the original; one that failed is marked."""
    labels = ["Case", "#Batch", "#Length", "#Magnitude", "Reference", "#Max relative"]
    labels += ["#Max absolute", "Worst element", "NaN", "Inf", "Result"]
    return make_table("Parity, case by case", labels, [_case(case) for case in parity.cases])


def layers(parity: ParityRecord) -> Table | None:
    """Return the errors of every layer, where layers were proven one by one."""
    rows = [
        [
            Cell(layer.name, layer.value or ""),
            Cell(error(layer.max_relative_error), tone="strong"),
            Cell("✓ passed", tone="good") if layer.passed else Cell("✗ failed", tone="bad"),
        ]
        for layer in parity.layers
    ]
    return make_table(
        "Layers, each on what the original's before it compute",
        ["Layer", "#Max relative", "Result"],
        rows,
    )


def _case(case: CaseRecord) -> list[Cell]:
    worst = case.worst
    values = f"{exact(worst.expected)} → {exact(worst.got)}" if worst else ABSENT
    index = f"[{', '.join(map(str, worst.index))}]" if worst else ""
    return [
        Cell(case.name, f"{case.output}, seed {case.seed}"),
        Cell(count(case.batch)),
        Cell(count(case.length)),
        Cell(count(case.magnitude)),
        Cell(case.reference),
        Cell(error(case.max_relative_error), tone="strong"),
        Cell(error(case.max_absolute_error)),
        Cell(values, index, tone="fixed"),
        _sides(case.nan),
        _sides(case.inf),
        Cell("✓ passed", tone="good") if case.passed else Cell("✗ failed", tone="bad"),
    ]


def _sides(sides: CountRecord) -> Cell:
    tone = "fixed" if sides.expected == sides.got else "bad"
    return Cell(f"{count(sides.expected)} → {count(sides.got)}", tone=tone)


def histogram(edges: Sequence[float], counts: Sequence[float]) -> Table | None:
    """The bins that hold anything, and those between."""
    filled = [index for index, much in enumerate(counts) if much > 0]
    inside = range(filled[0], filled[-1] + 1) if filled else range(0)
    rows = [
        [
            Cell(f"{10 ** edges[i]:.1e}"),
            Cell(f"{10 ** edges[i + 1]:.1e}"),
            Cell(count(counts[i])),
        ]
        for i in inside
    ]
    return make_table("Elements by relative error", ["#From", "#To", "#Elements"], rows, even=True)


def splits(streaming: StreamingRecord) -> Table | None:
    """The ways in which one sequence was cut."""
    rows = [
        [Cell(split(sizes)), Cell(count(sum(sizes))), Cell(count(len(sizes)))]
        for sizes in streaming.splits
    ]
    return make_table("Splits tried", ["Pieces, in tokens", "#Tokens", "#Calls"], rows)


def by_batch(rows: Sequence[LatencyRow]) -> dict[str, list[LatencyRow]]:
    """Rows grouped by batch size, each group in order of length."""
    groups: dict[str, list[LatencyRow]] = {}
    for row in sorted(rows, key=lambda row: row.length):
        groups.setdefault(count(row.batch), []).append(row)
    return groups


def series(rows: Sequence[LatencyRow]) -> list[Series]:
    """One line a runner, through the lengths at which it was measured."""
    found = []
    for key, name in NAMES.items():
        points = []
        for row in rows:
            x, p50 = positive(row.length), positive(row.median(key))
            if x is not None and p50 is not None:
                points.append(Point(x, p50, positive(row.p90(key))))
        found.append(Series(name, tuple(points)))
    return found


def latency(rows: Sequence[LatencyRow]) -> Table | None:
    """Median and ninetieth percentile of each runner by length, and speed-ups."""
    if not rows:
        return None
    labels = ["#Length", "#p50", "#p90", "#p50", "#p90", "#Speedup", "#p50", "#p90", "#Speedup"]
    groups = (("", 1), ("Artifact, ms", 2), ("Plain export, ms", 3), ("PyTorch eager, ms", 3))
    body = [(Cell(count(row.length)), *_runners(row)) for row in rows]
    return Table("Latency by length", headings(*labels), tuple(body), groups, even=True)


def _runners(row: LatencyRow) -> list[Cell]:
    cells: list[Cell] = []
    for key in NAMES:
        p50, ours = row.median(key), key == "artifact"
        if p50 is None:
            cells.append(_missing(row, key, 2 if ours else 3))
            continue
        cells += [Cell(amount(p50), tone="strong" if ours else ""), _spread(row.p90(key))]
        if not ours:
            cells.append(Cell(format_speedup(p50, row.artifact_ms), tone="strong"))
    return cells


def _spread(p90: float | None) -> Cell:
    return Cell(ABSENT, tone="open") if p90 is None else Cell(amount(p90))


def _missing(row: LatencyRow | DecodeRecord | MemoryRow, key: str, span: int = 1) -> Cell:
    reason = row.reasons.get(key)
    return Cell(f"could not run: {reason}" if reason else ABSENT, span=span, tone="open")


def decode(step: DecodeRecord | None) -> Table | None:
    """The time of one more token, a row a runner."""
    if step is None:
        return None
    rows: list[list[Cell]] = []
    for key, name in NAMES.items():
        p50 = step.median(key)
        if p50 is None:
            rows.append([Cell(name), _missing(step, key, 3)])
            continue
        gain = "" if key == "artifact" else format_speedup(p50, step.artifact_ms)
        rows.append(
            [Cell(name), Cell(amount(p50), tone="strong"), _spread(step.p90(key)), Cell(gain)]
        )
    labels = ["Runner", "#p50, ms", "#p90, ms", "#Speedup of the artifact"]
    return make_table("One decode step", labels, rows, even=True)


def memory(found: Sequence[MemoryRow]) -> Table | None:
    """Peak megabytes of each runner by length."""
    rows = []
    for row in found:
        cells = [Cell(count(row.length))]
        for key in ("io", *NAMES):
            peak, tone = row.peak(key), "strong" if key == "artifact" else ""
            cells.append(_missing(row, key) if peak is None else Cell(amount(peak), tone=tone))
        rows.append(cells)
    labels = ["#Length", "#Inputs and outputs, MB", "#Artifact, MB", "#Plain export, MB"]
    return make_table("Peak memory", [*labels, "#PyTorch, MB"], rows, even=True)
