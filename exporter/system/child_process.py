"""Processes of linexport's own: their command, and their end."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


def python_module(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of an installed package.

    The current directory, which may be a model's or an artifact's folder, is not on its path: a
    ``json.py`` in there would be imported in the place of Python's.
    """
    return [sys.executable, "-P", "-m", name, *arguments]


async def end(process: asyncio.subprocess.Process | None) -> None:
    """Kill a process where it still runs, and wait for its end; None is one that never ran."""
    if process is not None:
        if process.returncode is None:
            process.kill()
        await process.wait()
