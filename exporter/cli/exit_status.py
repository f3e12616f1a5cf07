"""The end of a command that made or checked an artifact: summary, paths, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from linexport.errors import ParityError


def finish(manifest: dict[str, Any], folder: Path, json: bool) -> None:
    """Print the summary unless JSON was, and exit 3 where parity failed."""
    if not json:
        from rich.console import Console

        from linexport.artifact.manifest import REPORT
        from linexport.report import render_summary

        console = Console(highlight=False)
        render_summary(manifest, console)
        first = (manifest["parity"] or {}).get("first_divergence")
        if first:
            where = f"{first['tensor']}, computed by {first['op']} {first['node']}"
            if "layer" in first:
                where += f", in {first['layer']} at token {first['position']} of row {first['row']}"
            console.print(f"First value that differs: {where}", markup=False)
        console.print(f"\nartifact  {folder}", soft_wrap=True, markup=False)
        console.print(f"report    {folder / REPORT}", soft_wrap=True, markup=False)
    if manifest["status"] != "ok":
        raise typer.Exit(ParityError.exit_code)
