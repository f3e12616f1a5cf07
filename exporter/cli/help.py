"""``--help``: options in panels by what they are for, whole names, and examples at the end.

    command, its options with their ``Panel`` -> usage, description, panels, examples

Types have no column of their own: a help text says what a value is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup

from linexport.manifest.options import Panel

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

ONE_PANEL = 8
"""Most options of a command that are listed under one heading."""

WIDEST = 110
"""Columns of the help on a wider terminal."""


class PanelCommand(TyperCommand):
    """A command with this help."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        for param in self.params:  # as an error names it
            if param.param_type_name == "argument" and param.name:
                param.metavar = param.name.upper()

    def get_usage(self, ctx: Any) -> str:
        """Return the line of the help, for errors."""
        return f"Usage: {usage(self, ctx.command_path)}"

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        _print(self, ctx)


class PanelGroup(TyperGroup):
    """A group of commands with this help."""

    def get_usage(self, ctx: Any) -> str:
        """Return the line of the help, for errors."""
        return f"Usage: {usage(self, ctx.command_path)}"

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        _print(self, ctx)


def add_command(app: typer.Typer, function: Callable[..., Any], *examples: str) -> None:
    """Add a command whose help ends with these command lines."""
    app.command(cls=PanelCommand, epilog="\n".join(examples))(function)


def options_by_panel(command: Any) -> dict[str, list[Any]]:
    """Return the visible options of a command under their headings, in the order of the help."""
    listed = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    if len(listed) <= ONE_PANEL:
        return {"Options": listed} if listed else {}
    headings = ["Options", *Panel]
    found: dict[str, list[Any]] = {heading: [] for heading in headings}
    for option in listed:
        found[option.rich_help_panel or "Options"].append(option)
    return {heading: options for heading, options in found.items() if options}


def default_text(option: Any) -> str:
    """Return the default of an option as a user would write it; empty where there is none."""
    value = option.default
    if option.required or value is None or value in ((), "") or callable(value):
        return ""
    if isinstance(value, bool):
        [positive, *_], negative = option.opts, option.secondary_opts
        return str(positive if value else negative[0]) if negative else ""
    return str(value) if option.show_default else ""


def usage(command: Any, name: str) -> str:
    """Return the line that says how a command is called."""
    words = [name, "[OPTIONS]"]
    words += [p.name.upper() for p in command.params if p.param_type_name == "argument"]
    if getattr(command, "commands", None):
        words.append("[COMMAND]" if command.invoke_without_command else "COMMAND")
    return " ".join(words)


def _print(command: Any, ctx: Any) -> None:
    from linexport.system.terminal import plain_console

    console = plain_console(highlight=False)
    console.width = min(console.width, WIDEST)
    console.print(f"Usage: {usage(command, ctx.command_path)}\n", markup=False, style="bold")
    for paragraph in (command.help or "").split("\n\n"):
        console.print(f"{' '.join(paragraph.split())}\n", markup=False)
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    panels = {"Arguments": arguments} | options_by_panel(command)
    rows = {title: [(_names(p), _help(p)) for p in listed] for title, listed in panels.items()}
    rows["Commands"] = [(name, _first_sentence(inner)) for name, inner in _commands(command, ctx)]
    width = max(
        (len(line) for part in rows.values() for names, _ in part for line in names.splitlines()),
        default=0,
    )
    for title, part in rows.items():
        if part:
            _print_panel(console, title, part, width)
    if command.epilog:
        console.print("Examples:", style="bold")
        console.print("\n".join(f"  {line}" for line in command.epilog.splitlines()), markup=False)


def _print_panel(
    console: Console, title: str, rows: Iterable[tuple[str, RenderableType]], width: int
) -> None:
    from rich.panel import Panel as Box
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    table.add_column(no_wrap=True, style="cyan", width=width)
    table.add_column(ratio=1)
    for names, text in rows:
        table.add_row(names, text)
    console.print(Box(table, title=title, title_align="left", border_style="dim"))


def _commands(command: Any, ctx: Any) -> list[tuple[str, Any]]:
    if not hasattr(command, "commands"):
        return []
    found = [(name, command.get_command(ctx, name)) for name in command.list_commands(ctx)]
    return [(name, inner) for name, inner in found if not inner.hidden]


def _first_sentence(command: Any) -> str:
    return " ".join((command.help or "").split("\n\n")[0].split())


def _names(param: Any) -> str:
    """Return the names of an option, those that turn it off in a second line."""
    if param.param_type_name == "argument":
        return str(param.name.upper())
    lines = (sorted(names, key=len) for names in (param.opts, param.secondary_opts) if names)
    return "\n".join(", ".join(names) for names in lines)


def _help(param: Any) -> RenderableType:
    from rich.text import Text

    text = Text(param.help or "")
    notes = [f"default: {default_text(param)}"] if default_text(param) else []
    notes += ["required"] if param.required and param.param_type_name == "option" else []
    notes += [f"or variable {param.envvar}"] if param.envvar else []
    for note in notes:
        text.append(f" [{note}]", style="dim")
    return text
