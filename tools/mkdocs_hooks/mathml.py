"""Formulas as MathML, written into the pages when the site is built: browsers need no script.

pymdownx.arithmatex finds ``$...$`` and ``$$...$$``, which code hosts render as well.
"""

from __future__ import annotations

import html
import re
from typing import Any

_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
_BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Replace every formula of a page; called by mkdocs."""
    content = _BLOCK.sub(lambda m: _mathml(m[1], "block"), content)
    return _INLINE.sub(lambda m: _mathml(m[1], "inline"), content)


def _mathml(latex: str, display: str) -> str:
    from latex2mathml.converter import convert

    return convert(html.unescape(latex).strip(), display=display)
