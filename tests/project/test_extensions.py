"""Entry points of other packages: loaded in order, and refused by package and reason."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from linexport.errors import EnvironmentProblemError
from linexport.system.extensions import (
    load_entry_points,
    raised_in,
    unusable,
)

GROUP = "linexport.test_group"

OBJECTS = """NUMBER, WORD = 3, "three"

def divide(): return NUMBER / 0

def call(function): function()
"""

Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make a distribution ``sample`` 1.2 with the module ``sample_objects`` importable."""

    def write(entries: str) -> None:
        info = tmp_path / "sample-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sample\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}\n")
        (tmp_path / "sample_objects.py").write_text(OBJECTS)
        monkeypatch.syspath_prepend(str(tmp_path))

    return write


def test_no_package_declares_the_group() -> None:
    assert list(load_entry_points(GROUP)) == []


def test_objects_come_sorted_by_name(install: Install) -> None:
    install("word = sample_objects:WORD\nnumber = sample_objects:NUMBER")
    assert list(load_entry_points(GROUP)) == [("number", 3), ("word", "three")]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("absent = sample_missing:OP", "cannot be loaded (ModuleNotFoundError: No module named"),
        ("absent = sample_objects:OP", "cannot be loaded (AttributeError: module"),
        ("absent = sample_objects:WORD", "is a str; expected a int"),
    ],
)
def test_a_broken_entry_point_names_its_package(install: Install, entry: str, reason: str) -> None:
    install(entry)
    with pytest.raises(EnvironmentProblemError) as caught:
        list(load_entry_points(GROUP, int))
    assert reason in str(caught.value)
    assert "'absent'" in str(caught.value) and "package sample 1.2" in str(caught.value)


def test_a_fault_is_that_of_the_package_whose_line_raised_it(install: Install) -> None:
    install("number = sample_objects:NUMBER")
    module = importlib.import_module("sample_objects")
    with pytest.raises(ZeroDivisionError) as raised:
        module.divide()
    assert raised_in(raised.value) == f"{module.__file__}:3"
    with pytest.raises(AttributeError) as below:
        module.call(partial(unusable, None, ""))
    assert raised_in(below.value) is None
