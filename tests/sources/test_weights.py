"""Weights that are not finite, looked at in parts."""

from __future__ import annotations

import math

import pytest
import torch

from linexport.errors import UnsupportedModelError
from linexport.sources import weights
from linexport.sources.weights import check_finite


@pytest.mark.parametrize("at_once", [1, 7, 2**22])
def test_every_part_of_a_weight_is_looked_at(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "AT_ONCE", at_once)
    values = torch.ones(9, 5).T  # its rows do not lie together in memory
    check_finite([("w", torch.nn.Parameter(values))], "model")
    values[4, 8], values[0, 0], values[2, 3] = math.nan, math.nan, math.inf
    parts = [("w", torch.nn.Parameter(values)), ("s", torch.nn.Parameter(torch.tensor(math.inf)))]
    with pytest.raises(UnsupportedModelError) as refused:
        check_finite(parts, "model")
    assert "w has 2 NaN and 1 Inf of 45 values; s has 1 Inf of 1 values" in str(refused.value)
    check_finite([("mask", torch.tensor([-math.inf])), ("none", torch.ones(0))], "model")
