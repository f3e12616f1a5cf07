"""One line out of torch's long exceptions."""

from __future__ import annotations

import re

TERMINAL_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def error_summary(error: BaseException) -> str:
    """Return the type and the first line of an exception."""
    text = TERMINAL_COLOUR.sub("", str(error)).strip() or "no message"
    return f"{type(error).__name__}: {text.splitlines()[0]}"


def innermost(error: BaseException) -> str:
    """Return those of the innermost cause: torch wraps it in several layers of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error_summary(error)
