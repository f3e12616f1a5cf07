"""Options such as ``--state-dict`` are not broken at their hyphens: they get a class for that."""

from __future__ import annotations

import re
from typing import Any

_CODE = re.compile(r"(?<=<code>)[^<]*(?=</code>)")
_OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


def on_page_content(content: str, **_: Any) -> str:
    """Mark every option in the code of a page; called by mkdocs."""
    return _CODE.sub(
        lambda code: _OPTION.sub(r'<span class="option">\g<0></span>', code[0]), content
    )
