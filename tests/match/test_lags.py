"""Modules that reach back by a constant stream rightly, or are exported without states and say why.

Constants are up to 3,000, streams of 4,000 tokens: a conversion that splits short sequences alone
cannot know.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.lags import NOTATIONS, draw, outcome_of

pytestmark = pytest.mark.usefixtures("one_thread")

ACAUSAL = ("ahead", "of_the_length")


def check(name: str, seed: int, folder: Path) -> None:
    drawn = draw(seed, name)
    found = outcome_of(drawn, folder / "artifact")
    assert found.kind in ("streams", "refused"), (drawn.name, drawn.constant, drawn.place, found)
    assert found.kind == "streams" or found.reason.startswith("exported without state: ")
    assert found.kind == "refused" or name not in ACAUSAL


@pytest.mark.parametrize(("name", "seed"), [("two_taps", 4), ("concatenated", 26), ("ahead", 22)])
def test_a_module_of_each_kind_streams_or_says_why_not(
    name: str, seed: int, tmp_path: Path
) -> None:
    check(name, seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NOTATIONS)
def test_no_module_streams_wrongly(name: str, seed: int, tmp_path: Path) -> None:
    check(name, 100 + seed, tmp_path)
