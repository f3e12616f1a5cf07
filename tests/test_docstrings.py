"""Docstrings begin with words that stand alone, without the code that calls or surrounds them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("exporter", "models", "plugins", "tools")

LEANING = re.compile(r"(Of|What|Those|It|As|With|Whether|The same|Attributes:)(?![\w-])")
"""Beginnings that say nothing without what came before."""

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def leaning(source: str) -> Iterator[str]:
    """Lines and first lines of the docstrings in a source that do not stand alone."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED):
            text = ast.get_docstring(node) or ""
            if LEANING.match(text):
                yield f"{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"


@pytest.mark.parametrize("folder", SOURCES)
def test_docstrings_stand_alone(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    found = [
        f"{path.relative_to(ROOT)}:{place}"
        for path in paths
        for place in leaning(path.read_text(encoding="utf-8"))
    ]
    assert not found, "begin these with an imperative or a noun phrase:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The same for keys.", True),
        ("Attributes:\n        a: b.", True),
        ("Whether it is a mask.", True),
        ("Offsets of the chunks.", False),
        ("As-if rule of the rewriter.", False),
        ("Append phi of keys to an ONNX body.", False),
    ],
)
def test_beginnings_are_told_apart(text: str, found: bool) -> None:
    assert bool(list(leaning(f'class A:\n    def f(self):\n        """{text}"""\n'))) is found
