"""The end of a command that made or checked an artifact: summary, paths, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from linexport.cli.errors import print_json
from linexport.errors import ParityError

if TYPE_CHECKING:
    from linexport.manifest import Manifest


def finish(manifest: Manifest, folder: Path, json: bool) -> None:
    """Print the summary, or the manifest as JSON; exit 3 where parity failed."""
    if json:
        from linexport.manifest import to_json

        print_json(to_json(manifest))
    else:
        from linexport.manifest import REPORT
        from linexport.report import render_summary
        from linexport.system.terminal import plain_console

        console = plain_console(highlight=False)
        render_summary(manifest, console)
        first = manifest.parity and manifest.parity.first_divergence
        if first:
            where = f"{first.tensor}, computed by {first.op} {first.node}"
            if first.layer:  # empty: the model itself
                where += f", in {first.layer}"
            if first.position is not None:
                where += f", at token {first.position} of row {first.row}"
            console.print(f"First value that differs: {where}", markup=False)
        console.print(f"\nartifact  {folder}", soft_wrap=True, markup=False)
        console.print(f"report    {folder / REPORT}", soft_wrap=True, markup=False)
    if manifest.status != "ok":
        raise typer.Exit(ParityError.exit_code)
