"""Commands that install linexport, as pages and templates say them: from one place.

pip install .                pip install '.[hf]'
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from linexport.system.install import SOURCE
from pages import ROOT

_TEXTS = {".md", ".yml"}
_COMMAND = re.compile(
    r"(?P<pip>pip install(?: --[\w-]+)*) "
    r"(?:(?P<quote>['\"])(?:\.|linexport)\[(?P<extras>[\w,-]+)\](?P=quote)"
    r"|(?:\.|linexport)(?=[\s`\"']|\.?$))",
    re.MULTILINE,
)


def current(text: str) -> str:
    """Return a text whose commands install from the present source."""

    def one(match: re.Match[str]) -> str:
        what = f"'{SOURCE}[{match['extras']}]'" if match["extras"] else SOURCE
        return f"{match['pip']} {what}"

    return _COMMAND.sub(one, text)


def texts() -> Iterator[Path]:
    """Yield the files of examples and templates, which are not pages."""
    for folder in ("docs/ci", "examples"):
        paths = sorted((ROOT / folder).rglob("*"))
        yield from (p for p in paths if p.is_file() and p.suffix in _TEXTS)
