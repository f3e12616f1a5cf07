"""Generated parts of the documentation: tables that would otherwise be typed by hand.

A page marks the place of a part, whose content the generator of that name returns as Markdown:

    <!-- generated: families -->
    ...
    <!-- end -->

A generator is an entry of ``PARTS`` in a module of this folder, found by scanning it.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
NONE = "–"

MARK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


@cache
def parts() -> dict[str, Callable[[], str]]:
    """Return every generator by the name that pages use."""
    found: dict[str, Callable[[], str]] = {}
    for module in pkgutil.iter_modules(__path__):
        found |= getattr(importlib.import_module(f"{__name__}.{module.name}"), "PARTS", {})
    return found


def pages() -> Iterator[Path]:
    """Yield every page of the project: Markdown at the root, in docs/ and in plugins/."""
    yield from sorted(ROOT.glob("*.md"))
    for folder in ("docs", "plugins"):
        yield from sorted((ROOT / folder).rglob("*.md"))


def filled(text: str) -> str:
    """Return a page with the content of its generated parts.

    Raises:
        KeyError: a mark names a part that no generator makes.
    """
    return MARK.sub(lambda m: f"{m[1]}\n{parts()[m[2]]().strip()}\n\n{m[3]}", text)


def table(titles: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table; a vertical bar in a cell is escaped."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def ms(value: float | None) -> str:
    """Return milliseconds with three digits, or a dash for what was not run."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
