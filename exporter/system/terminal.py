"""Text on a terminal, which obeys control characters: names come from models of strangers."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text


def printable(text: str) -> str:
    """Return a text in which characters that are not printed, except line breaks, are escapes."""
    return "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in text)


_REORDERING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that show those around them in another order."""


def visible_text(text: str) -> str:
    """Return a text of a language in which control characters are escapes.

    Line breaks, tabs and marks within words, such as joiners, stay as they are.
    """
    return "".join(c if c in "\n\t" or not _is_obeyed(c) else _escaped(c) for c in text)


def _is_obeyed(character: str) -> bool:
    return unicodedata.category(character) == "Cc" or character in _REORDERING


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def plain_console(**settings: Any) -> Console:
    """Return a console of rich that prints every text as ``printable`` gives it.

    Args:
        settings: arguments of ``rich.console.Console``.
    """
    from rich import console, segment

    class Plain(console.Console):
        def render_str(self, text: str, **settings: Any) -> Text:
            return super().render_str(printable(text), **settings)

        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for part in super().render(renderable, options):
                text = part.text if part.control else printable(part.text)
                yield segment.Segment(text, part.style, part.control)

    return Plain(**settings)
