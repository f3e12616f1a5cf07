"""``linexport plan``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from linexport.cli.errors import guarded, print_json
from linexport.cli.help import add_command
from linexport.cli.options import Json, completion
from linexport.manifest.options import Panel
from linexport.system.gpus import GPUS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from linexport.planning.estimate import DevicePlan

MOST_TOKENS, MOST_SEQUENCES, MOST_GB = 10**9, 10**6, 1e6
"""Limits far beyond any model and device, within which sizes of a graph are 64-bit integers."""


def plan(
    path: Annotated[
        Path,
        typer.Argument(help="An artifact, or a model folder of transformers (config.json)."),
    ],
    context: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST_TOKENS,
            help="Tokens of a sequence, prompt and answer together.",
            rich_help_panel=Panel.COMMON,
        ),
    ],
    device: Annotated[
        str | None,
        typer.Option(
            help="A GPU or Jetson by name, such as rtx4090, l4 or orin-nano. For a CPU, give "
            "--memory and --bandwidth.",
            rich_help_panel=Panel.COMMON,
            autocompletion=completion(lambda: (gpu.name for gpu in GPUS)),
        ),
    ] = None,
    batch: Annotated[
        int,
        typer.Option(
            min=1, max=MOST_SEQUENCES, help="Sequences at once.", rich_help_panel=Panel.COMMON
        ),
    ] = 1,
    memory: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=MOST_GB,
            help="GiB of memory, in place of the device's.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=MOST_GB,
            help="GB/s of its memory, in place of the device's.",
            rich_help_panel=Panel.COMMON,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Say whether a model fits a device, and how many tokens a second it can make at most."""
    with guarded(json):
        from dataclasses import asdict

        from linexport import planning

        found = planning.plan(
            path,
            device=device,
            context=context,
            batch=batch,
            memory=memory,
            bandwidth=bandwidth,
        )
        if json:
            print_json(asdict(found))
        else:
            _print(found)


def _print(found: DevicePlan) -> None:
    from linexport.system.terminal import plain_console

    console = plain_console(highlight=False)
    console.print(found.model, markup=False)
    console.print(
        f"{found.device}: {size(found.device_bytes)} at {found.bandwidth / 1e9:g} GB/s, of which "
        f"{size(found.usable_bytes)} for a model",
        markup=False,
    )
    sequences = "1 sequence" if found.batch == 1 else f"{found.batch:,} sequences"
    console.print(f"{sequences} of {found.context:,} tokens\n")
    _print_parts(found, console)
    console.print()
    console.print(_table(found))
    for warning in found.warnings:
        console.print(f"! {warning}", style="yellow", markup=False)


def _print_parts(found: DevicePlan, console: Console) -> None:
    from rich.table import Table

    parts = Table(box=None, pad_edge=False, show_header=False)
    parts.add_column()
    parts.add_column(justify="right")
    parts.add_column()
    if not found.streams:
        parts.add_row("scratch", size(found.scratch_bytes), "of a call: it has no states")
        console.print(parts)
        return
    token = found.key_value_bytes // (found.batch * found.context)
    parts.add_row("states", size(found.state_bytes), "of a fixed size")
    parts.add_row("keys and values", size(found.key_value_bytes), f"{size(token)} a token")
    parts.add_row("scratch", size(found.scratch_bytes), "of a step, or 64 tokens of a prompt")
    if found.prompt_bytes > found.scratch_bytes:
        parts.add_row("", size(found.prompt_bytes), "of a whole prompt in one call")
    console.print(parts)


def _table(found: DevicePlan) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    unit = "tokens" if found.streams else "sequences"
    for title in ("target", "weights", "their size", "memory", "fits", f"{unit}/s at most"):
        table.add_column(title, justify="left" if title in ("target", "weights") else "right")
    for row in found.rows:
        table.add_row(
            row.target,
            row.weights,
            size(row.weight_bytes),
            size(row.memory_bytes),
            "yes" if row.fits else "no",
            _rate(row.tokens_per_second or row.sequences_per_second),
            style="bold" if row.artifact else None,
        )
    return table


def _rate(found: float | None) -> str:
    """Return so many a second."""
    if found is None:
        return "-"
    return f"{found:,.0f}" if found >= 10 else f"{found:.1f}"


def size(count: int) -> str:
    """Return bytes in the unit in which they have one to four digits before the point."""
    amount, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1000 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if amount >= 100 or unit == "B" else f"{amount:.3g} {unit}"


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        plan,
        "linexport plan model.artifact --device orin-nano --context 8192",
        "linexport plan Qwen3.5-4B --device rtx4090 --context 32768 --batch 8",
        "linexport plan model.artifact --memory 8 --bandwidth 40 --context 8192",
    )
