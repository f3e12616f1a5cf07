"""Rows of prefill and decode as Markdown, CSV, plain data and a plot."""

from __future__ import annotations

import csv as table
import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from linexport.manifest.measured import RUNNERS, ThroughputRow
from linexport.system import escape
from linexport.system.json_object import JsonObject

NAMES = {"artifact": "artifact", "plain_export": "plain export", "pytorch": "PyTorch"}


def records(rows: Sequence[ThroughputRow]) -> list[JsonObject]:
    """Return the rows as plain data."""
    return [asdict(row) for row in rows]


def csv(rows: Sequence[ThroughputRow]) -> str:
    """Return the rows as CSV with a header."""
    text = io.StringIO()
    fields = list(ThroughputRow.__dataclass_fields__)
    writer = table.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records(rows))
    return text.getvalue()


def markdown(rows: Sequence[ThroughputRow]) -> str:
    """Return a table: tokens a second with their deviation, and the time of a call.

    A call of pp ends with the first token; one of tg is the time between two.
    """
    lines = ["| test | runner | t/s | call, ms | p99, ms |", "| --- | --- | ---: | ---: | ---: |"]
    for row in rows:
        if row.tokens_per_second is None:
            speed, call, late = row.reason or "not measured", "", ""
        else:
            spread = "" if row.deviation is None else f" ± {row.deviation:,.1f}"
            speed = f"{row.tokens_per_second:,.1f}{spread}"
            call, late = f"{row.call_ms:,.2f}", f"{row.call_p99_ms:,.2f}"
        cells = (row.test, _runner(row), speed, call, late)
        lines.append(f"| {' | '.join(map(escape.markdown, cells))} |")
    first: dict[tuple[str, str], ThroughputRow] = {}
    for one in reversed(rows):
        first[one.kind, one.runner] = one
    for kind, what in (("pp", "time to first token"), ("tg", "time between tokens")):
        found = [first.get((kind, runner)) for runner in RUNNERS]
        times = [f"{NAMES[r.runner]} {r.call_ms:,.2f} ms" for r in found if r and r.call_ms]
        name = next((r.test for r in found if r), "")
        if times:
            lines += ["", f"{what}, {escape.markdown(name)}: {', '.join(times)}"]
    return "\n".join(lines) + "\n"


def _runner(row: ThroughputRow) -> str:
    name = NAMES[row.runner]
    return name if row.provider == "cpu" else f"{name}, {row.provider}"


def plot(rows: Sequence[ThroughputRow], place: Path) -> None:
    """Draw tokens a second over depth: a line for each test and runner.

    Raises:
        OSError: the file cannot be written.
        ValueError: matplotlib knows no such kind of file.
    """
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, (kind, title) in zip(axes, (("pp", "prefill"), ("tg", "decode")), strict=True):
        for tokens in sorted({r.tokens for r in rows if r.kind == kind}):
            for runner in RUNNERS:
                line = sorted(
                    (r.depth, r.tokens_per_second, r.deviation or 0.0)
                    for r in rows
                    if (r.kind, r.tokens, r.runner) == (kind, tokens, runner)
                    and r.tokens_per_second is not None
                )
                if line:
                    depth, speed, spread = zip(*line, strict=True)
                    label = f"{kind}{tokens} {NAMES[runner]}"
                    axis.errorbar(depth, speed, spread, marker="o", capsize=3, label=label)
        axis.set(title=title, xlabel="tokens before", ylabel="tokens a second", yscale="log")
        axis.legend(fontsize="small")
    figure.savefig(place)
    pyplot.close(figure)
