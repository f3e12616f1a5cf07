"""``linexport doctor``."""

from __future__ import annotations

from typing import Any

import typer

from linexport.cli.errors import guarded, print_json
from linexport.cli.help import add_command
from linexport.cli.options import Json
from linexport.errors import EnvironmentProblemError


def doctor(json: Json = False) -> None:
    """Report versions, working providers, and what is missing with its install command."""
    with guarded(json):
        from linexport.inspection.doctor import examine

        report = examine()
        if json:
            print_json(report)
        else:
            _print(report)
        if not report["ok"]:
            raise typer.Exit(EnvironmentProblemError.exit_code)


def _print(report: dict[str, Any]) -> None:
    from rich.table import Table

    from linexport.system.terminal import plain_console

    console = plain_console(highlight=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    env = report["environment"]
    table.add_row("python", "", f"{env['python']} on {env['platform']}")
    table.add_row("cpu", "", f"{env['cpu']}, {env['cores']} cores")
    table.add_row("gpu", "", report["gpu"] or "none found")
    for name, version in report["required"].items():
        table.add_row(name, _mark(version is not None), version or "not installed")
    for provider in report["providers"]:
        text = "opened and run" if provider["works"] else provider["error"]
        table.add_row(provider["name"], _mark(provider["works"]), text)
    for name, module in {
        **report["libraries"],
        **report["tensorrt"],
        **report["extras"],
    }.items():
        table.add_row(
            name, _mark(module["version"] is not None), module["version"] or module["error"]
        )
    console.print(table)
    if report["missing"]:
        console.print("\nTo install what is missing:")
        for item in report["missing"]:
            console.print(f"  {item['install']}", markup=False)


def _mark(good: bool) -> str:
    return "[green]✓[/green]" if good else "[yellow]–[/yellow]"


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        doctor,
        "linexport doctor",
        "linexport doctor --json",
        "linexport -v doctor",
    )
