"""Bounds of the GPU kernels, by arithmetic: from docs/data/gpu_bounds.json."""

from __future__ import annotations

import json
from collections import Counter

from gpu.bounds_table import CASES, case_line
from gpu.cases import CASES as NODES
from gpu.peaks import SOURCES

from pages import ROOT, table

LONG = 0.1
"""Milliseconds beside which the start of a launch is nothing."""

SHOWN = ("prefill", "long", "layer prefill")


def bounds() -> str:
    """Peaks, how well bounds and times agree, and the cases of many tokens in bfloat16."""
    record = json.loads((ROOT / "docs" / "data" / "gpu_bounds.json").read_text())
    half = {case.name for case in NODES if case.dtype == "bfloat16"}
    shown = [x for x in record["cases"] if x["case"] in half and x["case"].startswith(SHOWN)]
    found = record["agreement"]
    long = [row["ratio"] for row in record["cases"] if row["ms"] > LONG]
    limits = Counter(row["limit"] for row in record["cases"])
    agreement = (
        f"Of {found['cases']} cases {found['below_1']} were measured to be faster than their "
        f"bound, {found['from_1_to_3']} take one to three times as long; the median is "
        f"{found['median']:.1f}, the largest {found['largest']:.0f}, and the logarithms of bounds "
        f"and times have a correlation of {found['correlation_of_logarithms']:.2f}. "
        f"The {len(long)} of more than {LONG} ms take {min(long):.1f} to {max(long):.1f} times as "
        f"long. {limits['memory']} are limited by memory, {limits['tensor']} by tensor cores, "
        f"{limits['issue']} by issue slots, {limits['latency']} by latency."
    )
    peaks = table(["NVIDIA H100 SXM", "at most", "source"], [list(row) for row in SOURCES])
    return "\n\n".join([peaks, agreement, "\n".join([CASES, *map(case_line, shown)])])


PARTS = {"gpu-bounds": bounds}
