"""A plan of features -> terminal: what a promise takes of every map, and which is the cheapest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from linexport.manifest.map_records import MapPlan, PlanRow
from linexport.report.text import amount, count, plain
from linexport.system.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console

NONE = "–"
_MANY = 10**8
EXPECTED = "Expected: bound on the mean kernel error"
KEPT = "Kept: draws within the error, of those that show the promise"


def headline(plan: MapPlan) -> str:
    """The map to take and its cost, or that there is none and what comes nearest."""
    if plan.chosen is not None:
        best = next(row for row in plan.rows if row.map == plan.chosen)
        words = f"{best.map} with M = {count(best.features)} is the cheapest that fits"
        costs = (
            f"{amount(best.us_per_token)} µs a token and {_kilobytes(best.state_bytes)} of state"
        )
        return f"{words}: {costs}, output error {amount(best.output_error)}."
    nearest = [row for row in plan.rows if row.output_error is not None]
    if not nearest:
        return "None: no map could be measured."
    best = min(nearest, key=lambda row: row.output_error or 0.0)
    words = f"None: no map fits. The nearest to softmax attention is {best.map} with M = "
    words += f"{count(best.features)}, output error {amount(best.output_error)}"
    return f"{words}; attending to all keys alike has {amount(plan.uniform_error)}."


def promise(plan: MapPlan) -> str:
    """Return a sentence on what is promised."""
    shown = "by Markov's inequality"
    if plan.confidence is not None:
        shown = f"shown by simulation with confidence {plan.confidence:g}"
    chance = f"with probability {plan.probability:g} over the draws, {shown}"
    if plan.quantity == "output":
        return f"Output within {amount(plan.error)} of softmax attention {chance}."
    scale = "absolute" if plan.absolute else "relative to the kernel's"
    return (
        f"Kernel error of at most {amount(plan.error)} (root mean square over {count(plan.pairs)} "
        f"pairs, {scale}) {chance}; output within {amount(plan.output_error)} of softmax attention."
    )


def print_plan(plan: MapPlan, console: Console) -> None:
    """The headline, the promise, and a line for every map."""
    from rich.table import Table as Grid

    console.print(printable(headline(plan)), markup=False)
    console.print(printable(promise(plan)), markup=False, style="dim")
    size = f"{count(plan.length)} tokens, d = {count(plan.d)}, {count(plan.heads)} heads"
    console.print(f"{printable(plain(plan.source))}; {size}\n", markup=False, style="dim")
    grid = Grid(box=None, pad_edge=False)
    for name in ("", "Map"):
        grid.add_column(name, no_wrap=True)
    simulated = plan.method == "simulation"
    promised = "Kept" if simulated else "Expected"
    for name in ("M needed", promised, "Kernel", "Output", "µs/ token", "State, KB"):
        grid.add_column(name, justify="right")
    for row in plan.rows:
        grid.add_row(*_cells(row), style="bold" if row.map == plan.chosen else "")
    console.print(grid)
    console.print(
        f"\n✓ fits. {KEPT if simulated else EXPECTED}; Kernel, Output: measured errors; with M "
        f"needed or, where that is more than {count(plan.most_features)}, with so many.",
        style="dim",
    )
    for row in plan.rows:
        if row.reason:
            console.print(f"{row.map}: {printable(row.reason)}", markup=False, style="yellow")


def _cells(row: PlanRow) -> list[str]:
    needed = NONE if row.needed is None else count(row.needed)
    if row.needed is not None and row.needed >= _MANY:
        needed = f"{float(row.needed):.0e}"
    errors = (row.kernel_error, row.output_error)
    promised = NONE if row.expected_error is None else _error(row.expected_error)
    return [
        "✓" if row.fits else "",
        row.map,
        needed,
        f"{row.kept}/{row.simulated}" if row.simulated else promised,
        *(NONE if error is None else _error(error) for error in errors),
        NONE if row.us_per_token is None else amount(row.us_per_token),
        NONE if row.state_bytes is None else amount(row.state_bytes / 1024),
    ]


def _error(error: float) -> str:
    """Return an error as text; rounding of float64 counts as zero."""
    return "0" if error < 1e-9 else amount(error)


def _kilobytes(size: int | None) -> str:
    return NONE if size is None else f"{amount(size / 1024)} KB"
