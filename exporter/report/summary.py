"""manifest -> lines on a terminal; every mark comes with a word, so colour may be absent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from linexport.manifest import Manifest
from linexport.manifest.measured import LatencyRow
from linexport.manifest.rewriting import RejectionRecord
from linexport.report.text import (
    KEPT,
    amount,
    count,
    format_speedup,
    grouped,
    others,
    stood_in,
)
from linexport.report.verdict import HOW_TO_MEASURE, MEASURED, SKIPPED, Check, checks, verdict
from linexport.system.terminal import printable

STYLES = {"good": "bold green", "bad": "bold red", "open": "yellow", "plain": "bold"}
MARKS = {"good": "✓ ", "bad": "✗ ", "open": "– ", "plain": ""}
ASCII_MARKS = {"good": "+ ", "bad": "x ", "open": "- ", "plain": ""}


def print_summary(manifest: Manifest, console: Console) -> None:
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
    if manifest.vision is not None:
        side = manifest.vision.merge
        tower = f"{manifest.vision.file}, one image a call, {side} x {side} patches a token"
        lines.add_row("Vision", _words(tower))
    if manifest.kept_attention:
        lines.add_row("Kept", _words(f"{KEPT}{_places(manifest.kept_attention)}"))
    if manifest.kernels:
        lines.add_row("Stood in", _words(stood_in(manifest.kernels)))
    for sentence in _refused(manifest.refused):
        lines.add_row("Refused", _words(sentence, STYLES["open"]))
    for check in _shortened(checks(manifest)):
        lines.add_row(check.name, _check(check, marks))
    for warning in grouped(manifest.warnings):
        lines.add_row("Warning", _words(warning, STYLES["open"]))
    console.print(lines)
    rows = sorted(manifest.latency or (), key=lambda row: row.length)
    if rows:
        console.print()
        console.print(_latency(rows))


def _shortened(found: Sequence[Check]) -> list[Check]:
    """Return checks, with one line for measurements of which all were skipped."""
    skipped = [check for check in found if check.detail == SKIPPED]
    if len(skipped) < len(MEASURED):
        return list(found)
    first = skipped[0]
    line = Check("Speed", first.anchor, first.tone, first.word, f"nor memory: {HOW_TO_MEASURE}")
    return [*(check for check in found if check.detail != SKIPPED), line]


def _refused(found: Sequence[RejectionRecord]) -> list[str]:
    """Return a sentence for each reason, with the first place it holds at."""
    places: dict[str, list[RejectionRecord]] = {}
    for one in found:
        places.setdefault(one.reason, []).append(one)
    sentences = []
    for reason, [first, *more] in places.items():
        where = f"{first.where}, {first.line}" if first.line else first.where
        same = f". {others(len(more))}." if more else ""
        sentences.append(f"{where}: {reason.removesuffix('.') if more else reason}{same}")
    return sentences


def _words(value: str, style: str = "") -> Text:
    return Text(printable(value), style=style)


def _check(check: Check, marks: Mapping[str, str]) -> Text:
    line = Text().append(f"{marks[check.tone]}{check.word}", style=STYLES[check.tone])
    return line.append(f"  {printable(check.detail)}")


def _places(found: Sequence[RejectionRecord]) -> str:
    return f" ({len(found)} layers)" if len(found) > 1 else ""


def _fused(manifest: Manifest) -> str:
    ops = ", ".join(f"{count(much)} {op}" for op, much in manifest.fused.items()) or "nothing"
    nodes = manifest.nodes
    return f"{ops} ({count(nodes.exported)} nodes to {count(nodes.artifact)})"


def _latency(rows: Sequence[LatencyRow]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("tokens", "batch", "artifact, ms", "plain export, ms", "PyTorch, ms"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            count(row.length),
            count(row.batch),
            _time(row, "artifact"),
            _time(row, "plain_export"),
            _time(row, "pytorch"),
        )
    return table


def _time(row: LatencyRow, key: str) -> Text:
    """A median and, for a baseline, how many times the artifact's it is."""
    median = row.median(key)
    if median is None:
        word = "could not run" if key in row.reasons else "not measured"
        return Text(word, style=STYLES["open"])
    value = Text(amount(median), style="bold" if key == "artifact" else "")
    if key == "artifact":
        return value
    return value.append(f"{format_speedup(median, row.artifact_ms):>7}", style="green")
