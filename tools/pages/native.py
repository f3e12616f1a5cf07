"""The table of the CPU library's speed, from docs/data/cpu/: a record for each machine."""

from __future__ import annotations

from typing import Any

from pages import ROOT, table
from pages.measured import NONE, circumstances, record


def cpu() -> str:
    """Ratios of every machine that has a record in docs/data/cpu/, side by side."""
    paths = sorted((ROOT / "docs/data/cpu").glob("*.json"))
    found = [record(f"cpu/{path.stem}") for path in paths]
    ratios = ("function / library", "ONNX Runtime's kernel / library", "library / bound", "load")
    titles = [f"{path.stem}: {ratio}" for path in paths for ratio in ratios]
    measured = [{(r["case"], r["length"]): r for r in f["result"]["rows"]} for f in found]
    rows = [
        [case, f"{length:,}", *(c for m in measured for c in _ratios(m.get((case, length))))]
        for case, length in dict.fromkeys(key for m in measured for key in m)
    ]
    where = [f"- `{p.stem}`: {circumstances(f)}" for p, f in zip(paths, found, strict=True)]
    return "\n\n".join(["\n".join(where), table(["layer", "tokens", *titles], rows)])


def _ratios(row: dict[str, Any] | None) -> list[str]:
    """Return the cells of one machine: no times, as other programs ran on it as well."""
    if row is None:
        return [NONE] * 4
    times = [_times(row["times_library"].get(who)) for who in ("function", "kernel")]
    return [*times, f"{row['library_over_bound']:.2f}", f"{row['load']:.1f}"]


def _times(ratio: float | None) -> str:
    return NONE if ratio is None else f"{ratio:.2f}"


PARTS = {"measured-cpu": cpu}
