"""Texts of messages in the package: every string, with ``…`` for what is filled in at run time."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from pages import ROOT

HOLE = "…"
FOLDERS = ("exporter", "models", "plugins")


def texts() -> Iterator[str]:
    """Yield every string of the package's source."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                text = _text(node)
                if text:
                    yield " ".join(text.split())


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) or HOLE for value in node.values)
    return ""
