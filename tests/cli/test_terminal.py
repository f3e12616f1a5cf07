"""Names of strangers on a terminal."""

from __future__ import annotations

import io

from rich.table import Table

from linexport.system.terminal import plain_console, printable

HOSTILE = "\x1b[2J\x1b]0;owned\x07 \u202egnp.exe \x9b31m"


def test_control_characters_are_shown_as_escapes() -> None:
    assert printable("a\nβ “c”") == "a\nβ “c”"
    assert printable(HOSTILE) == r"\x1b[2J\x1b]0;owned\x07 \u202egnp.exe \x9b31m"


def test_no_text_of_a_console_is_obeyed_by_the_terminal() -> None:
    written = io.StringIO()
    console = plain_console(file=written, width=200)
    table = Table("name")
    table.add_row(HOSTILE)
    console.print(table)
    console.print(HOSTILE, markup=False)
    assert written.getvalue().count("u202egnp.exe") == 2
    assert all(c.isprintable() or c == "\n" for c in written.getvalue())
