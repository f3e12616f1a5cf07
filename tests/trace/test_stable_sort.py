"""Stable sorts, beside PyTorch's."""

from __future__ import annotations

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from linexport.sources.factory import load_module
from linexport.trace import trace


class Sorted(nn.Module):
    """Nodes by their degree, as graph models order them, and back."""

    def __init__(self, descending: bool) -> None:
        super().__init__()
        self.descending = descending

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """(N, D)."""
        degrees = (x * 2).round().sum(1)
        order = torch.argsort(degrees, stable=True, descending=self.descending)
        found = torch.sort((x * 3).long(), dim=0, stable=True, descending=self.descending)
        mask, places = torch.sort(x > 0, dim=1, stable=True, descending=self.descending)
        return x[order], *found, mask, places


@pytest.mark.parametrize("descending", [False, True])
def test_equal_elements_keep_their_order(descending: bool) -> None:
    module = Sorted(descending)
    given = (module, (torch.randn(9, 5),), {}, ({0: Dim("nodes")},))
    graph = trace(load_module(given, "tests:sorted")).model
    run = onnxruntime.InferenceSession(graph.SerializeToString())
    for count in (1, 40):
        x = torch.randn(count, 5)
        for got, expected in zip(run.run(None, {"x": x.numpy()}), module(x), strict=True):
            torch.testing.assert_close(torch.from_numpy(got), expected)
