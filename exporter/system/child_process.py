"""The command of a process of linexport's own."""

from __future__ import annotations

import sys


def python_module(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of an installed package.

    The current directory, which may be a model's or an artifact's folder, is not on its path: a
    ``json.py`` in there would be imported in the place of Python's.
    """
    return [sys.executable, "-P", "-m", name, *arguments]
