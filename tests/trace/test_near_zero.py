"""Digits of expm1 and log1p, beside float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from linexport.sources.factory import load_module
from linexport.trace import trace

EXPONENTS = np.linspace(-30, np.log10(80), 2000)
POSITIVE = np.power(10.0, EXPONENTS).astype(np.float32)
EDGES = np.float32([0, np.inf, np.nan])
DIGITS = 4e-7
"""Three roundings to float32."""


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """(N,) -> (N,)."""
        return torch.cond(x[0] == 0, self.function, lambda x: self.function(x) * 1, (x,))


@pytest.mark.parametrize(
    ("function", "exact", "values"),
    [
        (torch.expm1, np.expm1, np.concatenate([EDGES, -EDGES, POSITIVE, -POSITIVE])),
        (torch.special.expm1, np.expm1, np.concatenate([POSITIVE, -POSITIVE])),
        (torch.log1p, np.log1p, np.concatenate([EDGES, POSITIVE, -POSITIVE])),
        (torch.special.log1p, np.log1p, np.concatenate([POSITIVE, np.float32([3e38, 1e10])])),
    ],
    ids=["expm1", "special.expm1", "log1p", "special.log1p"],
)
def test_digits_near_zero_are_kept(
    function: Callable[[Tensor], Tensor], exact: np.ufunc, values: np.ndarray
) -> None:
    given = (Function(function), (torch.randn(9),), {}, ({0: Dim("n")},))
    loaded = load_module(given, "tests:near_zero")
    graph = trace(loaded).model
    run = onnxruntime.InferenceSession(graph.SerializeToString())
    with np.errstate(all="ignore"):
        expected = exact(values.astype(np.float64))
    for x, right in ((values, expected), (values[::-1].copy(), expected[::-1])):
        (got,) = run.run(None, {"x": x})
        np.testing.assert_allclose(got, right, rtol=DIGITS, atol=0)
