"""Texts of strangers as parts of other languages: one function for each language.

Names come from models and folders that others made. A generator of code, configuration or pages
writes each of them through the function of its language, whatever characters it is known to have.
Terminals have theirs in ``linexport.system.terminal``.
"""

from __future__ import annotations

import re
import shlex
import string
from html import escape as html_escape

from linexport.system.terminal import printable

_CODE = frozenset(string.ascii_letters + string.digits + string.punctuation + " ")
"""Characters that stand for themselves in a string of a program, unless its language says more."""

_MARKS = re.compile(r"[\\`*{}\[\]<>#!|~&$@]|(?<![^\W_])_|_(?![^\W_])")
"""Characters that Markdown, HTML in it, or formulas in it may give a meaning in a line; an
underscore has none between letters."""


def cpp_string(text: str) -> str:
    """Return a string literal of C and C++, in ASCII: the bytes of the text in UTF-8.

    Octal escapes end after three digits, hexadecimal ones where no digit follows. A question mark
    is escaped because two of them begin a trigraph, which may be a backslash.
    """
    return _quoted(text, '"\\?')


def protobuf_string(text: str) -> str:
    """Return a string of the text format of Protocol Buffers, in ASCII."""
    return _quoted(text, '"\\')


def _quoted(text: str, escaped: str) -> str:
    def one(byte: int) -> str:
        letter = chr(byte)
        if letter in escaped:
            return f"\\{letter}"
        return letter if letter in _CODE else f"\\{byte:03o}"

    return f'"{"".join(map(one, text.encode("utf-8", "surrogateescape")))}"'


def python_string(text: str) -> str:
    """Return a string literal of Python, in ASCII."""
    return ascii(str(text))


def shell_word(text: str) -> str:
    """Return one word of a POSIX shell.

    Raises:
        ValueError: the text has a character that a script cannot hold, a zero, or that an editor or
            a terminal may obey.
    """
    if printable(text) != text or "\n" in text:
        raise ValueError(f"{text!a} is not written to a shell script")
    return shlex.quote(text)


def yaml_string(text: str) -> str:
    """Return a string of YAML in double quotes, in ASCII.

    JSON would not do: it writes characters above U+FFFF as two, which YAML reads as two.
    """

    def one(letter: str) -> str:
        if letter in '"\\':
            return f"\\{letter}"
        if letter in _CODE:
            return letter
        code = ord(letter)
        return f"\\u{code:04x}" if code < 2**16 else f"\\U{code:08x}"

    return f'"{"".join(map(one, text))}"'


def html(text: str) -> str:
    """Return text or an attribute's value of HTML and SVG; invisible characters are escapes."""
    return html_escape(printable(text))


def xml(text: str) -> str:
    """Return a text of characters that XML has; a writer of XML escapes those with a meaning."""
    return printable(text)


def markdown(text: str) -> str:
    """Return text within a line or a cell of Markdown, in one line."""
    line = " ".join(printable(text).split())
    return _MARKS.sub(r"\\\g<0>", line)


def workflow_message(text: str) -> str:
    """Return the text of a command in the log of a GitHub workflow."""
    shown = printable(text.replace("\r\n", "\n"))
    return shown.replace("%", "%25").replace("\n", "%0A")


def workflow_property(text: str) -> str:
    """Return a property of such a command."""
    return workflow_message(text).replace(":", "%3A").replace(",", "%2C")
