"""Where pip installs linexport from, in messages and in the documentation.

A release on an index sets ``SOURCE = "linexport"``; ``tools/generate_docs.py`` then writes the
pages again, and ``tests/project/test_install_commands.py`` finds what was left.
"""

from __future__ import annotations

SOURCE = "."
"""Argument of ``pip install``: the root of a clone, since linexport is not on an index."""

PLACE = "" if SOURCE == "linexport" else " in a clone of linexport, or its wheel's path for the dot"
"""Where a command with ``SOURCE`` works, for messages."""


def pip_install(extra: str = "", options: str = "") -> str:
    """Return the command that installs linexport, with an extra and options of pip."""
    words = ["pip install", *options.split(), f"'{SOURCE}[{extra}]'" if extra else SOURCE]
    return " ".join(words)


def pip_install_here(extra: str = "", options: str = "") -> str:
    """Return that command, and where it works, for a message."""
    return f"{pip_install(extra, options)}{PLACE}"
