"""Dims that are given as independent: those that a module takes together alone are one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import linexport
from linexport.sources.factory import load_module

FREE = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}


class Cached(nn.Module):
    """Softmax attention to the keys and values of a cache, and to the tokens."""

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        key, value = (torch.cat([past, x], 1) for past in cache)
        mask = torch.ones(x.shape[1], key.shape[1], dtype=torch.bool)
        mask = mask.tril(key.shape[1] - x.shape[1])
        return F.scaled_dot_product_attention(x, key, value, mask), key, value


class Apart(nn.Module):
    """Two sequences of lengths of their own."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.cumsum(1), y.cumsum(1)


def dims_of(module: nn.Module, args: tuple[Any, ...], shapes: Any) -> Any:
    return load_module((module.eval(), args, shapes), "tied:module").dynamic_shapes


def test_keys_and_values_of_a_cache_have_one_length(tmp_path: Path) -> None:
    cache = torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    args, given = (torch.randn(2, 7, 4), cache), (FREE, (FREE, FREE))
    x, (key, value) = dims_of(Cached(), args, given)
    assert key[1] is value[1] and isinstance(key[1], Dim) and x[1] is Dim.DYNAMIC
    module = Cached()
    manifest = linexport.convert(
        module, tmp_path / "a", args=args, dynamic_shapes=given, target="onnx", bench=False
    )
    assert manifest.status == "ok"
    wide, past = torch.randn(3, 4, 4), (torch.randn(3, 9, 4), torch.randn(3, 9, 4))
    names = [record.name for record in manifest.inputs]
    feeds = dict(zip(names, (x.numpy() for x in (wide, *past)), strict=True))
    got = linexport.load(tmp_path / "a").run(**feeds)
    for one, exact in zip(got.values(), module(wide, past), strict=True):
        np.testing.assert_allclose(one, exact.numpy(), rtol=1e-4, atol=1e-5)


def test_sequences_of_their_own_lengths_are_left_alone() -> None:
    args = torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    assert dims_of(Apart(), args, (FREE, FREE)) == (FREE, FREE)


def test_dims_that_have_a_name_are_left_alone() -> None:
    past = Dim("past")
    cache = torch.randn(2, 5, 4), torch.randn(2, 5, 4)
    own = {0: Dim.DYNAMIC, 1: past}
    _, found = dims_of(Cached(), (torch.randn(2, 7, 4), cache), (FREE, (own, own)))
    assert found == (own, own)
