"""Examples of other sizes, at which loops take few steps."""

from __future__ import annotations

import torch
from torch.export import Dim

from linexport.trace.examples import shortened


def test_a_shorter_example_is_of_whole_units_and_of_more_than_one() -> None:
    image = torch.randn(2, 3, 96, 72)
    shapes = ({2: 24 * Dim("height"), 3: 24 * Dim("width")},)
    found = shortened((image,), shapes, {96: 12, 72: 60})
    assert found is not None
    ((small,), _) = found
    assert isinstance(small, torch.Tensor) and small.shape == (2, 3, 48, 72)
