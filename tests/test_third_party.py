"""Modules of packages from PyPI, as their authors wrote them: none is wrong, none regresses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.converted import converted
from tests.support.third_party import MODULES

DATA = Path(__file__).resolve().parent.parent / "docs/data/third_party.json"
ROWS = {row["formulation"]: row for row in json.loads(DATA.read_text())["result"]["rows"]}


def test_the_table_has_modules_of_this_collection_and_none_is_wrong() -> None:
    assert set(ROWS) <= set(MODULES)
    assert not [name for name, row in ROWS.items() if row["kind"] == "wrong"]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ROWS))
def test_what_becomes_of_a_module(name: str) -> None:
    if not MODULES[name].installed:
        pytest.skip(f"{MODULES[name].package} is not installed")
    assert converted(name).kind == ROWS[name]["kind"]
