"""Squeezes of a dimension that varies: nothing for torch, and an error of ONNX's Squeeze."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linexport

pytestmark = pytest.mark.usefixtures("one_thread")


class Squeezed(nn.Module):
    """Linear attention between squeezes of the batch and of a dimension that is 1."""

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None].squeeze(1).squeeze(0).reshape(x.shape)
        q, k, v = x.chunk(3, -1)
        return torch.tril(q @ k.mT) @ v


def test_a_squeeze_of_the_batch_changes_nothing(tmp_path: Path) -> None:
    manifest = linexport.convert(
        Squeezed().eval(), args=(torch.randn(2, 12, 12),), output=tmp_path / "out", bench=False
    )
    assert manifest.status == "ok"
    assert manifest.fused == {"LinearAttention": 1}
    x = np.random.default_rng(0).standard_normal((3, 20, 12))
    (found,) = manifest.load().run(x.astype(np.float32)).values()
    q, k, v = np.split(x, 3, -1)
    expected = np.tril(q @ k.swapaxes(1, 2)) @ v
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
