"""What pages quote from the repository is there: messages, tests, files."""

from __future__ import annotations

import re
import tomllib
from functools import cache

from pages import messages

from tests.support import ROOT

DOCS = ROOT / "docs"
ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/.]+\.py)?::(\w+)`")
PATH = re.compile(r"`((?:exporter|models|plugins|tests|tools|examples|docs)/[\w/.-]*)`")


@cache
def texts() -> tuple[str, ...]:
    return tuple(messages.texts())


def test_quoted_messages_are_those_of_the_code() -> None:
    quoted = ROW.findall((DOCS / "messages.md").read_text(encoding="utf-8"))
    assert len(quoted) >= 60
    for message in quoted:
        parts = message.removeprefix("… ").removesuffix("…").strip()
        assert any(parts in text for text in texts()), f"no message like {message!r}"


def test_the_tests_that_the_mathematics_names_exist() -> None:
    file, found = "", 0
    for path, name in TEST.findall((DOCS / "math.md").read_text(encoding="utf-8")):
        file = path or file
        assert re.search(rf"^def {name}\b", (ROOT / file).read_text(), re.MULTILINE), (file, name)
        found += 1
    assert found >= 30


def test_the_sections_of_the_mathematics_that_code_cites_exist() -> None:
    sections = re.findall(r"^#+ (.*)$", (DOCS / "math.md").read_text(), re.MULTILINE)
    cited = [
        (path.name, " ".join(section.split()))
        for folder in ("exporter", "models", "plugins")
        for path in (ROOT / folder).rglob("*.py")
        for section in re.findall(r'docs/math\.md,\s+"([^"]+)"', path.read_text())
    ]
    assert len(cited) >= 8
    for name, section in cited:
        assert section in sections, f"{name} cites {section!r}"


def test_the_files_that_pages_name_exist() -> None:
    for page in [*DOCS.rglob("*.md"), *ROOT.glob("*.md")]:
        if page.name == "CHANGELOG.md":
            continue
        for path in PATH.findall(page.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_the_extras_of_the_install_page_exist() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = set(tomllib.load(file)["project"]["optional-dependencies"])
    named = set(re.findall(r"^\| `([\w-]+)` \|", (DOCS / "install.md").read_text(), re.M))
    assert named == extras - {"dev", "kernels", "test", "zoo"}
