"""Docstrings begin with words that stand alone, without the code that calls or surrounds them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("exporter", "models", "plugins", "tools")

LEANING = re.compile(r"(Of|What|Those|It|As|With|Whether|The same|Attributes:)(?![\w-])")
"""Beginnings that say nothing without what came before."""

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def leaning(source: str) -> Iterator[str]:
    """Lines and first lines of the docstrings in a source that do not stand alone."""
    for node in ast.walk(ast.parse(source)):
        for place, text in attribute_docstrings(node):
            if LEANING.match(text):
                yield f"{place}: {text.splitlines()[0]}"
        if isinstance(node, DOCUMENTED):
            text = ast.get_docstring(node) or ""
            if LEANING.match(text):
                yield f"{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"


def attribute_docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and texts of the strings that follow an assignment in a body."""
    body = getattr(node, "body", None)
    for before, after in pairwise(body if isinstance(body, list) else []):
        match before, after:
            case ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str(text))):
                yield after.lineno, text


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


def test_docstrings_of_constants_are_read_too() -> None:
    assert list(leaning('SHARE = 0.5\n"""Of the whole."""\n')) == ["2: Of the whole."]
    assert not list(leaning('SHARE = 0.5\n"""Share of the whole."""\n'))
