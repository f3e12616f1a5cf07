"""How-to pages are short, speak to the reader and leave measurements to the evidence pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import ROOT

DOCS = ROOT / "docs"
HOW_TO = ("Start", "Convert", "Run", "Deploy", "Check")
NOT_PROSE = ("|", "#", "!!!", ":::", "![")
TO_THE_READER = re.compile(
    r"(Use|Run|Pass|Add|Set|Install|Call|See|Make|Note|To|If|You|We|Let|Create|Load|Open|Check|Try"
    r"|Write|Start)\b"
)


def navigation() -> dict[str, list[Path]]:
    """The pages of each section."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    return {name: list(_pages(part)) for entry in config["nav"] for name, part in entry.items()}


def _pages(part: Any) -> list[Path]:
    if isinstance(part, str):
        return [DOCS / part]
    parts = part.values() if isinstance(part, dict) else part
    return [page for inner in parts for page in _pages(inner)]


def paragraphs(page: Path) -> list[str]:
    """Text without code, tables and headings, with links by their words."""
    text = re.sub(r"```.*?```|<!--.*?-->", " ", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(NOT_PROSE)]
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", "\n".join(lines))
    words = re.sub(r"`[^`]*`", "CODE", words)
    return [part.strip() for part in re.split(r"\n\s*\n", words) if part.strip()]


def sentences(page: Path) -> list[str]:
    items = [i for p in paragraphs(page) for i in re.split(r"\n?(?:^|\n)\s*(?:[-*]|\d+\.) ", p)]
    return [s for i in items for s in re.split(r"(?<=[.!?:])\s+", i.strip()) if len(s.split()) > 2]


@pytest.fixture(scope="module")
def how_to() -> list[Path]:
    found = [page for section in HOW_TO for page in navigation()[section]]
    assert len(found) >= 30
    return found


def test_how_to_pages_are_two_screens(how_to: list[Path]) -> None:
    words = {page.name: sum(len(p.split()) for p in paragraphs(page)) for page in how_to}
    assert sum(words.values()) / len(words) <= 450
    assert max(words.values()) <= 700, max(words, key=lambda name: words[name])


def test_how_to_pages_speak_to_the_reader(how_to: list[Path]) -> None:
    for page in how_to:
        said = sentences(page)
        share = sum(bool(TO_THE_READER.match(s)) for s in said) / len(said)
        assert share >= 0.1, f"{page.name}: {share:.0%} of {len(said)} sentences"


def test_how_to_pages_leave_numbers_to_the_evidence(how_to: list[Path]) -> None:
    text = " ".join(s for page in how_to for s in sentences(page))
    numbers = re.findall(r"(?<![\w.])\d[\d,.]*", text)
    assert 100 * len(numbers) / len(text.split()) <= 1.3


def test_no_paragraph_is_a_wall() -> None:
    for page in DOCS.rglob("*.md"):
        if page.parent.name == "evidence" or page.name == "benchmarks.md":
            continue
        for part in paragraphs(page):
            assert len(part.split()) <= 90, f"{page.name}: {part[:60]}"
