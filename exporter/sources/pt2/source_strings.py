"""Strings of an exported program that torch writes into generated Python source."""

from __future__ import annotations

import re

from linexport.errors import UnsupportedModelError

# \Z-exact ASCII patterns, used with fullmatch: `str.isidentifier` and `\w` admit characters that
# Python's own parser folds into others.
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,499}")
_LABEL = re.compile(r"[A-Za-z0-9_ .,:/@+-]{0,500}")
_SYMBOL = re.compile(r"(s|u|zf|zuf)\d{1,9}")
_MAX_TEXT = 2**16
_SHOWN = 80


def shorten(text: object) -> str:
    """`repr` for messages, cut."""
    shown = repr(text)
    return shown if len(shown) <= _SHOWN else shown[: _SHOWN - 1] + "…"


def identifier(text: str) -> None:
    """Names of values, arguments and subgraphs: they become local variables."""
    if not _IDENTIFIER.fullmatch(text):
        raise UnsupportedModelError(f"it has a name that is not an identifier: {shorten(text)}")


def identifier_or_empty(text: str) -> None:
    """Accept an identifier or nothing: positional arguments of control flow have an empty name."""
    if text:
        identifier(text)


def label(text: str) -> None:
    """Paths of parameters, dictionary keys, string inputs: they are put between quotes."""
    if not _LABEL.fullmatch(text) or re.search(r"(^|\.)__\w*__(\.|$)", text):
        raise UnsupportedModelError(f"it has a name with unexpected characters: {shorten(text)}")


def symbol(text: str) -> None:
    """Symbolic sizes and values: s0 (from an input), u0 (from data), zf0 and zuf0 (floats)."""
    if not _SYMBOL.fullmatch(text):
        raise UnsupportedModelError(f"it has a symbol that torch does not write: {shorten(text)}")


def text(value: str) -> None:
    """String arguments and traces, which torch keeps as they are or quotes itself."""
    # With FX_GRAPH_SHOW_META set, torch puts traces between triple quotes in generated source.
    if len(value) > _MAX_TEXT or '"""' in value or "\0" in value:
        raise UnsupportedModelError(f"it has an unexpected text: {shorten(value)}")
