"""Registries that other packages add to: a name that is taken is refused by package and reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from linexport import patches, targets
from linexport.errors import EnvironmentProblemError
from linexport.models.feature_maps import registry as map_registry
from linexport.passes import registry

OBJECTS = """
from linexport.models.feature_maps.relu import Relu
from linexport.passes import Pass, PassResult
from linexport.patches import Patch, Swap

PASS = Pass("simplify", "tidy", "nothing", lambda graph: PassResult(False))
TURN = Pass("rotary", "tidy", "nothing", lambda graph: PassResult(False))
LATE = Pass("late", "target", "nothing", lambda graph: PassResult(False))
PATCH = Patch((Swap("mamba_selective_scan", print),), ())
TARGET = "a target"


def __getattr__(name):
    if name == "Map":
        class Map(Relu):
            kind = "relu"
        return Map
    raise AttributeError(name)
"""


@pytest.mark.parametrize(
    ("group", "entry", "read", "reason"),
    [
        (
            "passes",
            "again = sample_additions:PASS",
            registry.all_passes,
            "is a pass named 'simplify', and there is one already",
        ),
        (
            "passes",
            "turn = sample_additions:TURN",
            registry.all_passes,
            "is a pass named 'rotary', and there is one already",
        ),
        (
            "passes",
            "late = sample_additions:LATE",
            registry.all_passes,
            "has the stage 'target', which only targets of linexport have",
        ),
        (
            "targets",
            "ort = sample_additions:TARGET",
            targets.listings,
            "has the name of a target that is there already",
        ),
        (
            "patches",
            "again = sample_additions:PATCH",
            patches.patches,
            "swaps mamba_selective_scan, which another patch swaps already",
        ),
        (
            "feature_maps",
            "again = sample_additions:Map",
            map_registry._load_all,
            "defines a feature map 'relu', and so does linexport.models.feature_maps.relu.Relu",
        ),
        ("passes", "gone = sample_additions:GONE", registry.all_passes, "cannot be loaded"),
        ("patches", "wrong = sample_additions:PASS", patches.patches, "expected a Patch"),
    ],
)
def test_what_cannot_be_added_names_its_package(
    group: str,
    entry: str,
    read: Any,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _install(tmp_path, monkeypatch, group, entry)
    uncached: Callable[[], object] = read.__wrapped__
    with pytest.raises(EnvironmentProblemError) as caught:
        uncached()
    assert reason in str(caught.value)
    assert "package sample 1.2" in str(caught.value)
    assert f"linexport.{group}" in str(caught.value)


def test_the_target_of_an_entry_point_must_be_one_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(tmp_path, monkeypatch, "targets", "elsewhere = sample_additions:TARGET")
    found = targets.listings.__wrapped__()
    assert found["elsewhere"].summary == ""
    with pytest.raises(EnvironmentProblemError, match=r"is a str; expected a Target"):
        found["elsewhere"].load()


def test_every_target_says_its_name_and_summary_in_its_first_line() -> None:
    for name, listing in targets.listings().items():
        assert targets.find_target(name).name == name
        assert listing.summary[0].isupper() and listing.summary.endswith(".")


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, group: str, entry: str) -> None:
    info = folder / "sample-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sample\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[linexport.{group}]\n{entry}\n")
    (folder / "sample_additions.py").write_text(OBJECTS)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(__import__("sys").modules, "sample_additions", raising=False)
