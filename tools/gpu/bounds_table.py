"""Tables of bounds in Markdown: a line a launch, and a line a case."""

from __future__ import annotations

from typing import Any

LAUNCHES = """| case | kernel | blocks x warps | registers | blocks a multiprocessor | waves | trips | copies, barriers a trip | instructions of a warp | GFLOP | MB | memory, ms | tensor cores, ms | issue slots, ms |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"""  # noqa: E501

CASES = """| case | blocks x warps | a multiprocessor | trips x instructions | memory, ms | tensor cores, ms | issue slots, ms | bound, ms | measured, ms | times the bound | clocks a trip | limit |
|---|---|---|---|---|---|---|---|---|---|---|---|"""  # noqa: E501

KINDS = ("memory_ms", "tensor_ms", "issue_ms")
WORDS = {"memory": "memory", "tensor": "tensor cores", "issue": "issue slots", "latency": "latency"}


def launch_line(case: str, row: dict[str, Any]) -> str:
    """A row of the table of launches; the instructions have "at least" where trips are not told."""
    cells = [
        *(case, f"`{row['kernel']}`", f"{row['blocks']:,} x {row['warps']}", row["registers"]),
        *(row["resident"], f"{row['waves']:.2f}", row["trips"] or ""),
        f"{row['copies']}, {row['barriers']}" if row["trips"] else "",
        f"{'at least ' * bool(row['loops_not_told'])}{row['instructions']:,}",
        f"{sum(row['flops'].values()) / 1e9:.1f}",
        f"{row['bytes'] / 1e6:,.1f}",
        *(f"{row[kind]:.3f}" for kind in KINDS),
    ]
    return f"| {' | '.join(map(str, cells))} |"


def case_line(row: dict[str, Any]) -> str:
    """A row of the table of cases: blocks and instructions are those of the last launch."""
    last = row["launches"][-1]
    cells = [
        *(row["case"], f"{last['blocks']:,} x {last['warps']}", str(last["resident"])),
        f"{last['trips']:,} x {last['of_a_trip']:,}" if last["trips"] else "",
        *(f"{row[kind]:.3f}" for kind in (*KINDS, "bound_ms", "ms")),
        f"{row['ratio']:.2f}",
        f"{row['clocks_a_trip']:,.0f}" if row["clocks_a_trip"] else "",
        WORDS[row["limit"]],
    ]
    return f"| {' | '.join(cells)} |"
