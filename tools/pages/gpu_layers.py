"""The table of layers of flash-linear-attention, converted without a GPU."""

from __future__ import annotations

from typing import Any

from pages import table
from pages.measured import record, with_circumstances


def _row(row: dict[str, Any]) -> list[str]:
    fused = ", ".join(f"{count} {op}" for op, count in row["fused"].items())
    found = fused or "nothing" if row["converts"] else row["reason"]
    streams = "yes" if row["streams"] else "no" if row["converts"] else ""
    errors = (row.get("error"), row.get("reference_error"))
    return [
        f"`{row['layer']}`",
        "yes" if row["converts"] else "no",
        found,
        streams,
        *("" if error is None else f"{error:.0e}" for error in errors),
    ]


def _layers() -> str:
    found = record("gpu_layers")
    rows = [_row(row) for row in found["result"]["rows"]]
    titles = ["layer", "converts", "fused, or why not", "streams", "error", "reference"]
    return with_circumstances(found, table(titles, rows))


PARTS = {"gpu-layers": _layers}
