"""Times of the GPU kernels beside their floors: from docs/data/gpu/, where a GPU was at hand."""

from __future__ import annotations

import json

from gpu.cases import CASES
from gpu.table import COPY, HEADER, line, roofline

from pages import ROOT


def times() -> str:
    """One table for each machine; without any, the floors."""
    found = [json.loads(path.read_text()) for path in sorted(ROOT.glob("docs/data/gpu/*.json"))]
    if not found:
        rows = [roofline(case, COPY) for case in CASES]
        head = "**The kernels have not been run on a GPU: their times are unmeasured.**"
        return "\n".join([head, "", HEADER, *map(line, rows)])
    return "\n\n".join(
        f"Measured {record['date']} on {record['machine']['gpu']}, by `{record['command']}`: "
        f"{sum(bool(row['faults']) for row in record['result']['checks'])} of "
        f"{len(record['result']['checks'])} nodes are wrong.\n\n"
        + "\n".join([HEADER, *map(line, record["result"]["times"])])
        for record in found
    )


PARTS = {"gpu-kernels": times}
