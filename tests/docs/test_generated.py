"""Generated parts of the pages are what the code and docs/data/ say today; the site builds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from linexport.manifest import options
from tests.support import ROOT


def test_generated_parts_are_current() -> None:
    script = str(ROOT / "tools" / "generate_docs.py")
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    said = f"{done.stdout}{done.stderr}"
    assert done.returncode == 0, f"{said}\nRun python tools/generate_docs.py and commit the result."


@pytest.mark.services
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Links and anchors within the site are checked: one that leads nowhere is a warning."""
    for extra in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(extra, reason="needs the docs extra: pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "index.html").read_text()
    assert "<h1" in page
    fetched = [line for line in page.splitlines() if 'src="http' in line or "@import" in line]
    assert not fetched, "a page loads something from the network"
    formulas = (tmp_path / "math" / "index.html").read_text()
    left = re.findall(r"\\(?:hat|cdot|frac|mathrm|left|lvert)\b.{0,40}", formulas)
    assert "<math" in formulas and not left, "formulas that are not MathML"
    reference = (tmp_path / "python" / "index.html").read_text()
    absent = [name for name in options.defaults() if f"<code>{name}</code>" not in reference]
    assert not absent, "options that the reference of linexport.convert leaves out"


def test_the_readme_fits_on_a_few_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 140


def test_a_version_of_the_changelog_fits_on_a_few_screens() -> None:
    versions = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    assert versions[0].startswith("Unreleased\n")
    longest = max(versions, key=lambda text: len(text.splitlines()))
    assert len(longest.splitlines()) <= 80, longest.splitlines()[0]
