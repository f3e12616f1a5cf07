"""``linexport inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from linexport.cli.errors import guarded, print_json
from linexport.cli.options import Json
from linexport.errors import UsageError


def inspect(
    path: Annotated[str, typer.Argument(help="A source, as for convert, or an artifact folder.")],
    json: Json = False,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page that draws the graph around each match, before and after."),
    ] = None,
) -> None:
    """Show the linear attention that is found in a model or an artifact, and what nearly is."""
    with guarded(json):
        from linexport.inspection import inspect as look

        found = look(path, drawings=html is not None)
        if html is not None:
            _write(html, found)
        if json:
            print_json(found)
        else:
            _print(found)
            if html is not None:
                typer.echo(f"\npage  {html}")


def _write(html: Path, found: dict[str, Any]) -> None:
    from linexport.artifact.write import replace_text
    from linexport.report import render_findings

    if found["kind"] == "artifact":
        raise UsageError(
            "--html draws what is found in a source; an artifact has its own report.html. Give "
            f"the model it was made from: {found['source']['location']}."
        )
    try:
        replace_text(html, render_findings(found))
    except OSError as error:
        raise UsageError(f"Cannot write {html}: {error.strerror}. Choose another place.") from None


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    source = found["source"]
    console.print(f"{source['description']} ({found['kind']}: {source['location']})", markup=False)
    for name, limits in found["dims"].items():
        high = limits["max"] if limits["max"] is not None else "any"
        console.print(f"dimension {name}: {limits['min']} to {high}", markup=False)
    for what, count in found["nodes"].items():
        if count is not None:
            console.print(f"nodes, {what}: {count}", markup=False)
    for warning in found.get("warnings", ()):
        console.print(f"! {warning}", style="yellow", markup=False)
    _print_findings(found, console)
    if found["ops"]:
        console.print()
        console.print(_table(found))
    elif found["kind"] != "artifact":
        console.print("\nNo linear attention was found: the model would be exported as it is.")


def _print_findings(found: dict[str, Any], console: Any) -> None:
    """Print the fused matches, and the rejected ones with their reasons."""
    from linexport.manifest.matches import MatchRecord
    from linexport.report.matches import facts, summary

    for match in found.get("matches", ()):
        record = MatchRecord.from_json(match)
        console.print(f"\n✓ {summary(record)}, computes {record.where}", style="green")
        for name, fact in facts(record):
            console.print(f"  {name}: {fact}", markup=False)
    for one in (*found.get("unmatched", ()), *found.get("rejected", ())):
        console.print(f"\n– {one['where']} was left as it is", style="yellow", markup=False)
        console.print(f"  {one['reason']}", markup=False)
    if found.get("mixing"):
        mixing = ", ".join(found["mixing"])
        console.print(f"\nDoes not stream, because tokens are mixed by: {mixing}", markup=False)


def _table(found: dict[str, Any]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("node", "op", "details", *(["lowering"] if found["kind"] == "artifact" else [])):
        table.add_column(title, overflow="fold")
    for op in found["ops"]:
        row = [op["node"], op["op"], op["details"]]
        if found["kind"] == "artifact":
            row.append(str(op["lowering"]))
        table.add_row(*row)
    return table


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(inspect)
