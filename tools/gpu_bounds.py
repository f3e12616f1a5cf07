"""Bounds of the GPU kernels, by arithmetic from their machine code, beside measured times.

    python tools/gpu_bounds.py --json docs/data/gpu_bounds.json    no GPU is needed
    python tools/gpu_bounds.py --variants variants.json            tiles as gpu_tiles.py has them

For each case of ``tools/gpu/cases.py`` the kernels of the route taken are compiled for compute
capability 9.0 and read; see ``tools/gpu/bounds.py`` for what follows from them. Times are those of
``docs/data/gpu/h100.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gpu.bounds import case_row, launch_row, tensor_bytes
from gpu.bounds_table import CASES as TABLE
from gpu.bounds_table import LAUNCHES, case_line, launch_line
from gpu.case import Case
from gpu.cases import CASES
from gpu.described import described
from gpu.peaks import H100
from gpu_tiles import planned

from linexport.models import feature_maps as feature_maps  # registers their formulas
from linexport.plugins.kernels.compile import compile_kernels

SM = 90
TIMES = Path(__file__).resolve().parent.parent / "docs" / "data" / "gpu" / "h100.json"


def rows_of(case: Case, variant: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each launch of a case, with a variant's tiles as ``gpu_tiles`` has them."""
    description = described(case, {SM: planned(case, variant, SM)})
    plan = description.plans[SM]
    values = plan.symbols(case.batch, case.length, H100.multiprocessors)
    tensors = [x for x in description.tensors if x is not None]
    sizes = tensor_bytes(tensors, plan.single, values)
    binaries = compile_kernels(plan.kernels(), SM)
    return [
        launch_row(launch, binaries[launch.kernel.name], values, sizes, H100)
        for launch in plan.single.launches
    ]


def agreement(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How bounds and measured times go together."""
    ratios = np.array([row["ratio"] for row in rows])
    logs = np.log([[row["bound_ms"], row["ms"]] for row in rows])
    return {
        "cases": len(rows),
        "below_1": int((ratios < 1).sum()),
        "from_1_to_3": int(((ratios >= 1) & (ratios <= 3)).sum()),
        "median": float(np.median(ratios)),
        "largest": float(ratios.max()),
        "correlation_of_logarithms": float(np.corrcoef(logs.T)[0, 1]),
    }


def rounded(value: Any) -> Any:
    """Return a result with five digits of every fraction."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def print_variants(wanted: dict[str, list[dict[str, Any]]]) -> int:
    """Print a line a launch of tiles that the plans do not choose."""
    print(LAUNCHES)
    for case in CASES:
        for variant in wanted.get(case.name, []):
            for launch in rows_of(case, variant):
                print(launch_line(f"{case.name} {variant}", launch), flush=True)
    return 0


def main() -> int:
    """Print a line a launch and a line a case, and write all of it."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--only", action="append", help="a case's name; all without it")
    options.add_argument("--json", type=Path, help="write the result there")
    options.add_argument("--variants", type=Path, help="tiles to read in place of the plan's")
    given = options.parse_args()
    if given.variants:
        return print_variants(json.loads(given.variants.read_text()))
    times = {row["name"]: row["ms"] for row in json.loads(TIMES.read_text())["result"]["times"]}
    rows = []
    print(LAUNCHES)
    for case in CASES:
        if case.name not in times or (given.only and case.name not in given.only):
            continue
        row = case_row(case, rows_of(case, {}), times[case.name], H100)
        rows.append(row)
        for launch in row["launches"]:
            print(launch_line(case.name, launch), flush=True)
    result = {"agreement": agreement(rows), "cases": rows}
    print("", TABLE, *map(case_line, rows), "", result["agreement"], sep="\n")
    if given.json:
        command = "python tools/gpu_bounds.py --json docs/data/gpu_bounds.json"
        given.json.write_text(json.dumps({"command": command, **rounded(result)}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
