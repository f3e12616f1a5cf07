"""``linexport doctor``."""

from __future__ import annotations

import typer

from linexport.cli.errors import guarded, print_json
from linexport.cli.help import add_command
from linexport.cli.options import Json
from linexport.errors import EnvironmentProblemError
from linexport.system.json_object import JsonObject


def doctor(json: Json = False) -> None:
    """Report what this machine can use, and what is missing: what for, and what installs it."""
    with guarded(json):
        from linexport.inspection.doctor import examine

        report = examine()
        if json:
            print_json(report)
        else:
            _print(report)
        if not report["ok"]:
            raise typer.Exit(EnvironmentProblemError.exit_code)


def _print(report: JsonObject) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from linexport.inspection.doctor import parts
    from linexport.system.install import PLACE
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
    for name, part in parts(report).items():
        table.add_row(name, _mark(part["version"] is not None), part["version"] or part["error"])
    console.print(table)
    if report["usable"]:
        console.print("\nThis machine can:")
        for purpose in report["usable"]:
            console.print(Padding(Text(purpose), (0, 0, 0, 2)))
    if report["missing"]:
        console.print("\nWhat is missing, what it is for, and what installs it:")
        for item in report["missing"]:
            console.print(Padding(Text(f"{item['what']}: {item['why']}"), (0, 0, 0, 2)))
            console.print(f"    {item['install']}", markup=False, soft_wrap=True)
        if PLACE:
            console.print(f"\nRun commands with a dot{PLACE}.", soft_wrap=True)


def _mark(good: bool) -> str:
    return "[green]✓[/green]" if good else "[yellow]–[/yellow]"


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(
        app,
        doctor,
        "linexport doctor",
        "linexport doctor --json",
        "linexport doctor --verbose",
    )
