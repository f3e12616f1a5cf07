"""The table of where the time of a conversion goes: a column for each size of model."""

from __future__ import annotations

from typing import Any

from pages import NONE, table
from pages.measured import record, with_circumstances

NAMES = {
    "import": "start of Python, imports",
    "load": "loading the model",
    "trace": "tracing",
    "rewrite": "rewriting, lowering, writing",
    "compare": "comparing and streaming",
    "library": "comparing the CPU library",
    "work": "counting its work",
    "measure": "measuring (`--bench short`)",
    "report": "report and end",
}


def conversion_time() -> str:
    """Return the table with its circumstances."""
    found = record("conversion_time")
    return with_circumstances(found, _rows(found["result"]))


def _rows(result: dict[str, Any]) -> str:
    sizes = result["sizes"]
    parts = [part for part in NAMES if any(one["parts"].get(part) for one in sizes)]
    parts += sorted({part for one in sizes for part in one["parts"]} - set(NAMES))
    rows = [
        [NAMES.get(part, part), *(_seconds(one["parts"].get(part)) for one in sizes)]
        for part in parts
    ]
    rows.append(["**together**", *(f"**{_seconds(one['total'])}**" for one in sizes)])
    without = [one["total"] - one["parts"].get("measure", 0.0) for one in sizes]
    rows.append(["with `--no-bench`", *map(_seconds, without)])
    rows.append(["processor time", *(_seconds(one["processor_seconds"]) for one in sizes)])
    runs = result["repeats"]
    said = f"the run of the median total of {runs}" if runs > 1 else "one run each"
    circumstances = (
        f"Seconds from prompt to prompt, {said}; load average of the last fifteen minutes: "
        f"{result['load_average']}."
    )
    return f"{circumstances}\n\n{table(['', *map(_title, sizes)], rows)}"


def _title(one: dict[str, Any]) -> str:
    layers = "a layer" if one["layers"] == 1 else f"{one['layers']} layers"
    words = [f"{layers}, {one['width'] // 64} heads"]
    words += [f"vocabulary {one['vocabulary']:,}"] if one["vocabulary"] else []
    return f"{', '.join(words)} ({one['parameters'] / 1e6:.1f} M)"


def _seconds(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f}"


PARTS = {"conversion-time": conversion_time}
