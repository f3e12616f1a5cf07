"""Where code within a line may be broken: options at no hyphen, long names after their dots."""

from __future__ import annotations

import re
from typing import Any

_CODE = re.compile(r"(?<=<code>)[^<]*(?=</code>)")
_OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")
_LONG_NAME = re.compile(r"[\w.]{30,}")


def on_page_content(content: str, **_: Any) -> str:
    """Mark every option, and the dots of long names, in the code of a page; called by mkdocs."""
    return _CODE.sub(lambda code: _marked(code[0]), content)


def _marked(code: str) -> str:
    dotted = _LONG_NAME.sub(lambda name: name[0].replace(".", ".<wbr>"), code)
    return _OPTION.sub(r'<span class="option">\g<0></span>', dotted)
