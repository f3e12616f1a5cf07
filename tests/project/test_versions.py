"""Releases that are tested: what is pinned, required, run and told are the same."""

from __future__ import annotations

import json
import re
import tomllib
from itertools import chain
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from linexport.system import versions
from linexport.system.versions import TRANSFORMERS, WINDOWS, ReleaseWindow
from tests.support import ROOT
from tests.support.families import BASES, TINY, WITH_TOWERS

RUNS: list[dict[str, Any]] = json.loads((ROOT / "docs/data/versions.json").read_text())["runs"]
WINDOW = ReleaseWindow("some-library", "5.18.0", "5.24.0")


def requirements() -> dict[str, SpecifierSet]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    lines = [*project["dependencies"], *chain.from_iterable(extras)]
    return {r.name: r.specifier for r in map(Requirement, lines) if r.name != "linexport"}


def pins() -> dict[str, str]:
    text = (ROOT / "constraints.txt").read_text()
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE))


def test_no_requirement_ends_below_the_next_major_version() -> None:
    for name, allowed in requirements().items():
        oldest = max(Version(s.version) for s in allowed if s.operator in (">=", "=="))
        assert allowed.contains(f"{oldest.major}.{oldest.minor + 1000}"), name


@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: window.package)
def test_what_is_pinned_and_what_is_tested_may_be_installed(window: ReleaseWindow) -> None:
    allowed = requirements()[window.package]
    assert window.holds(pins()[window.package])
    assert window.oldest in allowed and window.newest in allowed
    below = Version(window.oldest)
    assert f"{below.major}.{below.minor - 1}" not in allowed


@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: window.package)
def test_the_ends_of_a_window_were_run(window: ReleaseWindow) -> None:
    run = {versions.numbers(run["releases"][window.package])[:2] for run in RUNS}
    ends = {versions.numbers(release)[:2] for release in (window.oldest, window.newest)}
    assert ends <= run


def test_every_model_type_streams_with_the_newest_transformers() -> None:
    runs = [r for r in RUNS if r["releases"]["transformers"] == TRANSFORMERS.newest]
    found = {name: said for run in runs for name, said in run["types"].items()}
    assert found.keys() >= {*TINY, *WITH_TOWERS, *BASES}


def test_every_type_that_was_run_streams() -> None:
    for run in RUNS:
        others = {name: said for name, said in run["types"].items() if said != "streams"}
        assert not others, run["releases"]


@pytest.mark.parametrize(
    ("installed", "advice"),
    [
        (None, "some-library is not installed: pip install 'some-library==5.24.0'."),
        ("5.30.0", "5.30.0 is installed; linexport is tested with 5.18.0 to 5.24.0: pip install"),
        ("5.17.9", "5.17.9 is installed; linexport is tested with 5.18.0 to 5.24.0: pip install"),
        ("5.24.3", "5.24.3 is installed, and linexport is tested with 5.18.0 to 5.24.0, but not"),
    ],
)
def test_advice_names_what_is_installed_and_what_works(
    installed: str | None, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "version", lambda package: installed)
    assert advice in WINDOW.advice()


@pytest.mark.parametrize(
    ("release", "numbers"), [("2.13.0+cpu", (2, 13, 0)), ("5.25.0.dev0", (5, 25, 0)), ("", ())]
)
def test_releases_are_compared_by_their_numbers(release: str, numbers: tuple[int, ...]) -> None:
    assert versions.numbers(release) == numbers
