"""Lines that commands print, without characters that a terminal would obey."""

from __future__ import annotations

import os

import typer

from linexport.system.terminal import printable


def echo(
    text: object = "",
    *,
    err: bool = False,
    nl: bool = True,
    fg: str | None = None,
    bold: bool = False,
) -> None:
    """Print a text as ``printable`` gives it.

    Args:
        text: may have several lines.
        err: on standard error.
        nl: end the line.
        fg: colour of the text, where the terminal has colours and NO_COLOR is not set.
        bold: in bold type, in the same places.
    """
    color = False if os.environ.get("NO_COLOR") else None
    typer.secho(printable(str(text)), err=err, nl=nl, fg=fg, bold=bold or None, color=color)
