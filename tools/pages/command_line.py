"""The command line reference: every command with its arguments and options, from the program."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pages import table


def command_line() -> str:
    """Return a section for each command and subcommand."""
    import typer.main

    from linexport.cli import app

    return "\n\n".join(_sections(typer.main.get_command(app), "linexport"))


def _sections(command: Any, name: str) -> Iterator[str]:
    commands = getattr(command, "commands", {})
    if not commands or (getattr(command, "invoke_without_command", False) and name != "linexport"):
        yield _section(command, name)
    for child in sorted(commands):
        yield from _sections(command.get_command(None, child), f"{name} {child}")


def _section(command: Any, name: str) -> str:
    from linexport.cli.help import default_text, options_by_panel, usage

    parts = [f"## `{name}`", _paragraphs(command.help), f"```text\n{usage(command, name)}\n```"]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    if arguments:
        rows = [[f"`{a.name.upper()}`", _plain(a.help)] for a in arguments]
        parts.append(table(["Argument", ""], rows))
    for panel, options in options_by_panel(command).items():
        rows = []
        for option in options:
            default = "required" if option.required else _code(default_text(option))
            rows.append([_names(option), _plain(option.help), default])
        columns = 3 if any(row[2] for row in rows) else 2
        parts.append(table([panel, "", "Default"][:columns], [row[:columns] for row in rows]))
    parts.append(f"```text\n{command.epilog}\n```")
    return "\n\n".join(parts)


def _paragraphs(text: str | None) -> str:
    return "\n\n".join(_plain(part) for part in re.split(r"\n\s*\n", text or ""))


def _plain(text: str | None) -> str:
    return " ".join((text or "").split()).replace("<", "&lt;").replace("*", "\\*")


def _names(option: Any) -> str:
    return ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


PARTS = {"command-line": command_line}
