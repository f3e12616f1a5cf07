"""manifest -> lines on a terminal; every mark has a word beside it, so colour may be absent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from linexport.report.text import (
    ABSENT,
    amount,
    count,
    items,
    mapping,
    number,
    objects,
    plain,
    printable,
    times,
)
from linexport.report.verdict import Check, checks, verdict

STYLES = {"good": "bold green", "bad": "bold red", "open": "yellow", "plain": "bold"}
MARKS = {"good": "✓ ", "bad": "✗ ", "open": "– ", "plain": ""}
ASCII_MARKS = {"good": "+ ", "bad": "x ", "open": "- ", "plain": ""}


def print_summary(manifest: Mapping[str, Any], console: Console) -> None:
    """The verdict, then one line a topic, then latencies by length."""
    marks = ASCII_MARKS if console.options.ascii_only else MARKS
    found = verdict(manifest)
    console.print()
    console.print(_words(f"{marks[found.tone]}{found.sentence}", STYLES[found.tone]))
    console.print()
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column()
    lines.add_row("Fused", _words(_fused(manifest)))
    for one in objects(manifest.get("refused")):
        refusal = f"{plain(one.get('where'))}: {plain(one.get('reason'))}"
        lines.add_row("Refused", _words(refusal, STYLES["open"]))
    for check in checks(manifest):
        lines.add_row(check.name, _check(check, marks))
    for warning in items(manifest.get("warnings")):
        lines.add_row("Warning", _words(plain(warning), STYLES["open"]))
    console.print(lines)
    rows = sorted(
        objects(manifest.get("latency")), key=lambda row: number(row.get("length")) or 0.0
    )
    if rows:
        console.print()
        console.print(_latency(rows))


def _words(value: str, style: str = "") -> Text:
    return Text(printable(value), style=style)


def _check(check: Check, marks: Mapping[str, str]) -> Text:
    line = Text().append(f"{marks[check.tone]}{check.word}", style=STYLES[check.tone])
    return line.append(f"  {printable(check.detail)}")


def _fused(manifest: Mapping[str, Any]) -> str:
    if manifest.get("fused") is None:
        return ABSENT
    counts = mapping(manifest["fused"])
    ops = ", ".join(f"{count(much)} {op}" for op, much in counts.items()) or "nothing"
    nodes = mapping(manifest.get("nodes"))
    if not nodes:
        return ops
    return f"{ops} ({count(nodes.get('exported'))} nodes to {count(nodes.get('artifact'))})"


def _latency(rows: list[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("tokens", "batch", "artifact, ms", "plain export, ms", "PyTorch, ms"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            count(row.get("length")),
            count(row.get("batch")),
            _time(row, "artifact"),
            _time(row, "plain_export"),
            _time(row, "pytorch"),
        )
    return table


def _time(row: Mapping[str, Any], key: str) -> Text:
    """A median and, for a competitor, how many times the artifact's it is."""
    if number(row.get(f"{key}_ms")) is None:
        reason = mapping(row.get("reasons")).get(key)
        return Text("could not run" if reason else "not measured", style=STYLES["open"])
    value = Text(amount(row[f"{key}_ms"]), style="bold" if key == "artifact" else "")
    if key == "artifact":
        return value
    return value.append(f"{times(row[f'{key}_ms'], row.get('artifact_ms')):>7}", style="green")
