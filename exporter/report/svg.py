"""What every drawing is made of: words, lines, and the document around them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def text(x: float, y: float, words: str, style: str) -> str:
    """Words at a point."""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    """From one point to another."""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line class="{style}" {ends}/>'


def document(
    ident: str, title: str, what: str, width: int, height: int, parts: Sequence[str]
) -> str:
    """A drawing that a page holds inline, described for those who cannot see it."""
    name = escape(ident)
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(what)}</desc>'
        f"{''.join(parts)}</svg>"
    )
