"""Branches on a length that the example decides."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from linexport.sources.loaded_model import LoadedModel, Source
from linexport.trace.branches import left_by_next
from linexport.trace.program import export_program

CHUNK = 8


class Padded(nn.Module):
    """Sums of whole chunks, of padding cut off where there is any, as fla's Mamba2 has them."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D)."""
        length = x.shape[1]
        padding = (CHUNK - length % CHUNK) % CHUNK
        x = F.pad(x, (0, 0, 0, padding))
        chunks = x.reshape(x.shape[0], -1, CHUNK, x.shape[2])
        y = (chunks + chunks.sum(2, keepdim=True)).flatten(1, 2)
        if padding > 0:
            y = y[:, :length]
        return y


class Different(Padded):
    """What is computed of whole chunks is not what is computed of others."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D)."""
        if x.shape[1] % CHUNK != 0:
            return super().forward(x) * 2
        return super().forward(x)


def loaded(module: nn.Module, length: int) -> LoadedModel:
    shapes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
    example = (torch.randn(2, length, 3),)
    return LoadedModel(module.eval(), example, {}, shapes, Source("factory", "x", None, "", None))


@pytest.mark.parametrize("length", [4 * CHUNK, 4 * CHUNK - 1, 4 * CHUNK - 3])
def test_a_branch_that_is_right_for_every_length_is_traced(length: int) -> None:
    program = export_program(loaded(Padded(), length)).module(check_guards=False)
    for other in (1, 2, CHUNK, CHUNK + 1, 3 * CHUNK, 5 * CHUNK - 1, 9 * CHUNK):
        x = torch.randn(3, other, 3)
        torch.testing.assert_close(program(x), Padded()(x))


def test_a_branch_that_computes_otherwise_is_not() -> None:
    program = export_program(loaded(Different(), 4 * CHUNK))
    assert left_by_next(program)
    x = torch.randn(2, 4 * CHUNK, 3)
    torch.testing.assert_close(program.module()(x), Different()(x))
