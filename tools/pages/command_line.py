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
        yield from _sections(commands[child], f"{name} {child}")


def _section(command: Any, name: str) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    usage = " ".join([name, "[OPTIONS]", *(a.name.upper() for a in arguments)])
    text = f"## `{name}`\n\n{_paragraphs(command.help)}\n\n```text\n{usage}\n```"
    if arguments:
        rows = [[f"`{a.name.upper()}`", _plain(a.help)] for a in arguments]
        text += "\n\n" + table(["argument", ""], rows)
    if options:
        rows = [[_names(o), _plain(o.help), _default(o)] for o in options]
        text += "\n\n" + table(["option", "", "default"], rows)
    return text


def _paragraphs(text: str | None) -> str:
    return "\n\n".join(_plain(part) for part in re.split(r"\n\s*\n", text or ""))


def _plain(text: str | None) -> str:
    return " ".join((text or "").split()).replace("<", "&lt;").replace("*", "\\*")


def _names(option: Any) -> str:
    return ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])


def _default(option: Any) -> str:
    value = option.default
    if option.required:
        return "required"
    if value is None or value == () or callable(value):
        return ""
    if isinstance(value, bool):
        both = option.secondary_opts
        return f"`{option.opts[0] if value else both[0]}`" if both else ""
    return f"`{value}`"


PARTS = {"command-line": command_line}
