"""The program ends with its last line.

Python frees every module and every object of a process that ends, which takes seconds after
PyTorch was imported, and has no effect that lasts: functions of ``atexit`` have removed temporary
folders by then.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_LOST = 120
"""Python's own exit code where what was printed cannot be written."""

_code: list[int] = []
"""The last exit code of the program; empty while it runs, or where it ended otherwise."""


def install() -> None:
    """End this process, and not only the program, after every function of ``atexit``.

    Those that are registered later run earlier, so that this comes first in a process.
    """
    atexit.register(_end)


@contextmanager
def exit_code_kept() -> Iterator[None]:
    """Keep the exit code of what runs inside; exceptions are left to Python."""
    try:
        yield
        _code.append(0)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            _code.append((error.code or 0) & 0xFF)
        raise


def _end() -> None:
    if not _code:
        return
    code = _code[-1]
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # it was closed before the program began
                stream.flush()
        except (OSError, ValueError):
            code = code or _LOST
    os._exit(code)
