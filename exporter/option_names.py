"""Options in messages: flags for a command line, keywords for Python.

    --overwrite             overwrite=True
    --no-mtp                mtp=False
    --weights int4          weights="int4"
    --max-kld               max_kld
      linexport convert ... a call of linexport.convert, where the command has a line of its own

Messages are written with flags; other commands in them stay as they are, to be run in a shell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Keyword:
    """An option as Python takes it.

    Attributes:
        name: of the parameter.
        words: values that are texts, where there are few.
        flag: it is given without a value.
        several: it takes a list.
        off: value that ``--no-`` and the name stand for, as Python writes it.
    """

    name: str
    words: tuple[str, ...] = ()
    flag: bool = False
    several: bool = False
    off: str = "False"


_KEYWORDS = {
    "--source": Keyword("source"),
    "--provider": Keyword("provider"),
    "--output": Keyword("output"),
    "--length": Keyword("length"),
    "--features": Keyword("features"),
    "--distil": Keyword("distil"),
    **{f"--{name}": Keyword(name, flag=True) for name in ("strict", "record", "force")},
}
"""Options by flag; ``convert`` adds its own where they are declared."""

_OPTION = re.compile(
    r"(?P<line>(?<=\n)  linexport convert [^\n]*)"
    r"|(?P<command>linexport [a-z]+ .*?(?=[.,;](\s|$)|\n|$))"
    r"|(?<![\w-])(?P<flag>--[a-z][a-z-]*)(?P<value> [a-z0-9][a-z0-9-]*\b)?"
)

_as_flags: ContextVar[bool | None] = ContextVar("as_flags", default=None)
"""Choice of this thread: flags or keywords; None: as its process does."""

_programs: list[bool] = []
"""Not empty where the process is the command line, all threads of which show flags."""


def add_keyword(flag: str, keyword: Keyword) -> None:
    """Make an option known to messages."""
    _KEYWORDS[flag] = keyword


def own_process() -> None:
    """Say that this process is the command line: all its threads show flags."""
    _programs.append(True)


@contextmanager
def shown_as_flags() -> Iterator[None]:
    """Show options in messages of this thread as the command line has them."""
    before = _as_flags.set(True)
    try:
        yield
    finally:
        _as_flags.reset(before)


def shown(message: str) -> str:
    """Return a message, which names flags, for whoever reads it."""
    here = _as_flags.get()
    flags = bool(_programs) if here is None else here
    return message if flags else _OPTION.sub(_in_python, message)


def _in_python(found: re.Match[str]) -> str:
    if found["line"]:
        return f"  {_call(shlex.split(found['line']))}"
    if found["command"]:
        return found["command"]
    flag, value = found["flag"], found["value"] or ""
    keyword = _KEYWORDS.get(flag)
    if keyword is None:
        off = _KEYWORDS.get(f"--{flag.removeprefix('--no-')}")
        return found[0] if off is None else f"{off.name}={off.off}{value}"
    if keyword.flag:
        return f"{keyword.name}=True{value}"
    if value.strip() in keyword.words:
        return f'{keyword.name}="{value.strip()}"'
    if keyword.several and value.strip().isdecimal():
        return f"{keyword.name}=[{value.strip()}]"
    return f"{keyword.name}{value}"


def _call(words: list[str]) -> str:
    """Return a command as a call of ``linexport.convert``."""
    source, *options = words[2:]
    given: dict[str, list[str]] = {}
    for flag, value in zip(options[::2], options[1::2], strict=False):
        given.setdefault(flag, []).append(value)
    arguments = [f'"{source}"']
    for flag, values in given.items():
        keyword = _KEYWORDS[flag]
        quoted = ", ".join(f'"{value}"' for value in values)
        arguments.append(f"{keyword.name}={f'[{quoted}]' if keyword.several else quoted}")
    return f"linexport.convert({', '.join(arguments)})"
