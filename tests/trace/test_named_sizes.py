"""Sizes that a ``Dim`` names, in models whose code compares them with single values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from linexport.errors import UnsupportedModelError
from linexport.passes.rewriting import rewrite
from linexport.plugins.ops.registry import attach_functions
from linexport.sources.factory import load_module
from linexport.trace import trace
from tests.support.runtimes import session

SIZES = {0: Dim("batch"), 2: Dim("height"), 3: Dim("width")}


class Strided(nn.Module):
    """A convolution with strides, which torch compares with a size of 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 12, 3, 2, 1)

    def forward(self, image: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, 4, H', W')."""
        x = self.stem(image)
        q, k, v = x.flatten(2).chunk(3, 1)
        q, k = q.relu() + 0.1, k.relu() + 0.1
        out = (v @ k.mT) @ q / (k.sum(-1)[:, None] @ q)
        return out.reshape(x.shape[0], 4, *x.shape[2:])


class Table(Strided):
    """The same with positions, from a table at one height and computed at any other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.arange(8.0)[:, None] / 8)

    def forward(self, image: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, 4, H', W')."""
        height, rows = image.shape[2], self.rows
        if height != 8:
            rows = torch.arange(height, dtype=torch.float32)[:, None] / height
        return super().forward(image + rows)


class Fixed(Strided):
    """The same with a table of one height."""

    def forward(self, image: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, 4, H', W')."""
        return super().forward(image + torch.ones(10, 1))


@pytest.mark.parametrize("kind", [Strided, Table])
def test_named_sizes_vary_where_code_excludes_one_value(kind: type[nn.Module]) -> None:
    module = kind().eval()
    loaded = load_module((module, (torch.randn(2, 3, 10, 12),), (SIZES,)), "named:sizes")
    traced = trace(loaded)
    assert {n: (r.min, r.max, r.batch) for n, r in traced.dims.items()} == {
        "batch": (1, None, True),
        "height": (1, None, False),
        "width": (1, None, False),
    }
    rewritten = rewrite(traced.model)
    attach_functions(rewritten.model)
    opened = session(rewritten.model)
    for shape in ((1, 3, 1, 1), (3, 3, 8, 21), (1, 3, 17, 6)):
        x = torch.randn(shape)
        (got,) = opened.run(None, {"image": x.numpy()})
        with torch.no_grad():
            expected = kind().double()(x.double()).numpy()
        np.testing.assert_allclose(got, expected, atol=2e-5 * np.abs(expected).max())


def test_a_size_that_code_fixes_is_still_an_error() -> None:
    loaded = load_module((Fixed(), (torch.randn(2, 3, 10, 12),), (SIZES,)), "named:sizes")
    with pytest.raises(UnsupportedModelError, match=r"specialized it to be a constant \(10\)"):
        trace(loaded)
