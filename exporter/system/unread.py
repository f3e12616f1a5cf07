"""Output that its reader leaves changes nothing: a command goes on and keeps its exit code.

    linexport validate artifact | head -3       exit code 3 where parity fails, 0 where it passes

Python raises BrokenPipeError instead, in the middle of a command or after its end.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

_left: list[bool] = []
"""Not empty once a reader has left."""


def install() -> None:
    """Make standard output and standard error of this process take what nobody reads."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:  # it was closed before the program began
            setattr(sys, name, _leavable(stream))


def left() -> bool:
    """Return whether the reader of an output has left: a text without end may end then."""
    return bool(_left)


def _leavable(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(_Leavable(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering or stream.write_through,
    )


class _Leavable(io.FileIO):
    """A file that is turned to the null device when its reader has left."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            _left.append(True)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return super().write(data)
