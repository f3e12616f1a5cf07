"""``-v`` and ``-vv``, before or after the name of a command: what linexport decides, and why.

    (none)  errors and results only
    -v      decisions: what was rewritten, fused, chosen, and how long each pass took
    -vv     reasons against: why a rewrite did not apply

Messages are those of ``logging`` below the name ``linexport``, on standard error.
"""

from __future__ import annotations

import copy
import logging
import sys
from typing import Any

import typer

from linexport.cli.help import PanelGroup
from linexport.system.terminal import printable

COUNT = "linexport.verbosity"
"""Key of the invocation's shared data under which occurrences of the option are counted."""

LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)
FORMAT = "%(name)s: %(message)s"


class _Formatter(logging.Formatter):
    """Writes names of strangers, and exceptions, without characters that a terminal would obey."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _Stderr(logging.StreamHandler):
    """Writes to what ``sys.stderr`` is at the time, which a spinner replaces while it turns."""

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        pass


_HANDLER = _Stderr()
_HANDLER.setFormatter(_Formatter(FORMAT))


def set_verbosity(context: typer.Context, count: int) -> None:
    """Add occurrences of the option to those of this invocation, and log accordingly."""
    context.meta[COUNT] = context.meta.get(COUNT, 0) + count
    log = logging.getLogger("linexport")
    log.setLevel(LEVELS[min(context.meta[COUNT], len(LEVELS) - 1)])
    log.addHandler(_HANDLER)


class VerboseGroup(PanelGroup):
    """A group whose option ``verbose`` is an option of each of its commands as well."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of that name, with the option."""
        command = super().get_command(ctx, cmd_name)
        option = next(p for p in self.params if p.name == "verbose")
        if command is not None:
            _add(command, option)
        return command


def _add(command: Any, option: Any) -> None:
    if all(p.name != option.name for p in command.params):
        own = copy.copy(option)
        own.expose_value = False
        command.params.append(own)
    for inner in getattr(command, "commands", {}).values():
        _add(inner, option)
