"""Modules of packages from PyPI, as their authors wrote them: none is wrong, none regresses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from linexport.patches import delta_rules
from tests.support.converted import converted
from tests.support.third_party import MODULES

DATA = Path(__file__).resolve().parents[2] / "docs/data/third_party.json"
ROWS = {row["formulation"]: row for row in json.loads(DATA.read_text())["result"]["rows"]}


def test_the_table_has_modules_of_this_collection_and_none_is_wrong() -> None:
    assert set(ROWS) <= set(MODULES)
    assert not [name for name, row in ROWS.items() if row["kind"] == "wrong"]


def test_masked_tokens_of_rwkv7_give_zeros_and_leave_the_state() -> None:
    """In the words of the package: S w + (S a) b^T + v k^T, whose output is S r."""
    [function] = [f for f in delta_rules.FUNCTIONS if f.name == "rwkv7_recurrent"]
    random = np.random.default_rng(0)
    r, w, k, v, a, b = random.normal(size=(6, 2, 5, 3, 4)) * 0.5
    w, begin = np.exp(-np.abs(w)), random.normal(size=(2, 3, 4, 4))
    mask = np.array([[0, 1, 1, 0, 1], [1, 1, 1, 1, 0]])
    state, expected = begin.swapaxes(2, 3), np.zeros_like(v)
    for t in range(5):
        read = np.einsum("bhvk,bhk->bhv", state, a[:, t])
        following = state * w[:, t, :, None] + np.einsum("bhv,bhk->bhvk", read, b[:, t])
        following += np.einsum("bhv,bhk->bhvk", v[:, t], k[:, t])
        kept = mask[:, t, None, None, None] == 1
        state = np.where(kept, following, state)
        output = np.einsum("bhvk,bhk->bhv", following, r[:, t])
        expected[:, t] = np.where(kept[..., 0], output, 0.0)
    given = [torch.from_numpy(x) for x in (r, w, k, v, a, b, begin, mask)]
    found, last = function.replacement(*given)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    np.testing.assert_allclose(last, state.swapaxes(2, 3), atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ROWS))
def test_what_becomes_of_a_module(name: str) -> None:
    if not MODULES[name].installed:
        pytest.skip(f"{MODULES[name].package} is not installed")
    assert converted(name).kind == ROWS[name]["kind"]
