"""Options such as ``--state-dict`` are not broken at their hyphens: they get a class for that."""

from __future__ import annotations

import re
from typing import Any

_OPTION = re.compile(r"<code>(--?[a-z][a-z-]*)</code>")


def on_page_content(content: str, **_: Any) -> str:
    """Mark every option of a page; called by mkdocs."""
    return _OPTION.sub(r'<code class="option">\1</code>', content)
