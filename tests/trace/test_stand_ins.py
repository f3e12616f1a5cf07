"""Functions that fix sizes when torch exports them are exported for any length."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.pieces import rewritten

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 6


def places(x: Tensor) -> Tensor:
    return (torch.arange(x.shape[1]) - 3).clamp(min=0)[None, :, None]


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "maxima of a window": lambda x: F.max_pool1d(F.pad(x.mT, (4, 0)), 5, 1).mT,
    "maxima of steps": lambda x: nn.MaxPool1d(3, stride=2, padding=1, ceil_mode=True)(x.mT).mT,
    "where maxima are": lambda x: x + F.max_pool1d(x.mT, 3, 1, 1, return_indices=True)[1].mT,
    "of the tensor's own": lambda x: x.take_along_dim(places(x).expand_as(x), 1),
    "broadcast": lambda x: torch.take_along_dim(x, places(x), dim=-2),
    "other broadcast": lambda x: torch.take_along_dim(x[:1, :, :1], places(x).expand_as(x), dim=1),
    "flattened": lambda x: torch.take_along_dim(x, 2 * torch.arange(3 * x.shape[1])),
}


class Applied(nn.Module):
    """One of the functions."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = FUNCTIONS[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_fixes_sizes_is_exported_for_any(name: str) -> None:
    model = rewritten(Applied(name), torch.randn(2, 40, WIDTH))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for batch, length in ((1, 1), (3, 17), (2, 64)):
        x = torch.randn(batch, length, WIDTH)
        (given,) = session.get_inputs()
        (got,) = session.run(None, {given.name: x.numpy()})
        np.testing.assert_array_equal(got, FUNCTIONS[name](x).numpy())
