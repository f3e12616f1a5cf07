"""Numbers of tokens that a model takes and returns: how many came before, and how many there were.

Whole sequences and pieces of an artifact against the module in float64; later calls of a
sequence are given other numbers, which they do not read, and the last returns that of all tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import linexport
from linexport.manifest import Manifest
from tests.support.independent import Independent

WIDTH = 4
Outputs = tuple[Tensor, ...]


class Rotary(nn.Module):
    """Linear attention on rotated features, from a state and a position of its own."""

    others = (torch.randn(2, WIDTH, WIDTH), torch.tensor(5))

    def turned(self, x: Tensor, angles: Tensor) -> Tensor:
        a, b = x.abs().chunk(2, -1)
        return torch.cat(
            [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1
        )

    def forward(self, x: Tensor, state: Tensor, position: Tensor) -> Outputs:
        tokens = x.shape[1]
        steps = torch.arange(tokens) + position[..., None]
        angles = steps[..., None] * torch.tensor([0.3, 0.05])
        q, k = self.turned(x, angles), self.turned(x.flip(-1), angles)
        y = q @ state + (q @ k.mT).tril() @ x
        return y, state + k.mT @ x, position + tokens


class Rows(Rotary):
    """A position of each row."""

    others = (torch.randn(2, WIDTH, WIDTH), torch.tensor([5, 2]))


class Mean(nn.Module):
    """The mean of all tokens so far: their sum and their number are given and returned."""

    others = (torch.randn(2, WIDTH), torch.tensor([5]))

    def forward(self, x: Tensor, total: Tensor, count: Tensor) -> Outputs:
        counts = count + torch.arange(1, x.shape[1] + 1)
        y = (total[:, None] + x.cumsum(1)) / counts[None, :, None]
        total, count = total + x.sum(1), count + x.shape[1]
        return y, total, count, total / count


class Summed(Mean):
    """Numbers of tokens as a running sum of ones."""

    def forward(self, x: Tensor, total: Tensor, count: Tensor) -> Outputs:
        counts = count + torch.ones(x.shape[1], dtype=torch.int64).cumsum(0)
        y = (total[:, None] + x.cumsum(1)) / counts[None, :, None]
        return y, total + x.sum(1)


class Shared(nn.Module):
    """Each token reads how many there are: no piece knows."""

    others = (torch.tensor(5),)

    def forward(self, x: Tensor, count: Tensor) -> Outputs:
        count = count + x.shape[1]
        return x.cumsum(1) / count, count


class Multiple(nn.Module):
    """A product of the number of tokens is not counted on."""

    others = (torch.tensor(5),)

    def forward(self, x: Tensor, count: Tensor) -> Outputs:
        return x.cumsum(1), count * x.shape[1]


def converted(module: nn.Module, others: tuple[Tensor, ...], folder: Path) -> Manifest:
    dims = (
        {0: "batch", 1: "time"},
        *({0: "batch"} if len(x.shape) and len(x) == 2 else {} for x in others),
    )
    args = (torch.randn(2, 12, WIDTH), *others)
    return linexport.convert(
        module, folder, args=args, dynamic_shapes=dims, target="onnx", bench=False, threads=1
    )


@pytest.mark.parametrize("kind", [Rotary, Rows, Mean, Summed])
def test_a_returned_number_of_tokens_goes_on(kind: type[nn.Module], tmp_path: Path) -> None:
    module = kind().eval()
    others: tuple[Tensor, ...] = kind.others
    manifest = converted(module, others, tmp_path / "a")
    assert manifest.status == "ok" and manifest.streaming.passed
    found, random = Independent(tmp_path / "a"), np.random.default_rng(3)
    for length in (1, 2, 9, 140):
        x = random.standard_normal((2, length, WIDTH)).astype(np.float32)
        with torch.no_grad():
            given = [y.double() if y.is_floating_point() else y for y in others]
            expected = [y.numpy() for y in module(torch.from_numpy(x).double(), *given)]
        for pieces in ([length], [1] * length, [length // 2 + 1, length - length // 2 - 1]):
            given = [y.numpy() for y in others]
            later = [np.asarray(y + 3) if y.dtype.kind == "i" else y for y in given]
            got = found.outputs(x, [n for n in pieces if n], given, later)
            for one, exact in zip(got, expected, strict=True):
                assert one.shape == exact.shape
                assert np.abs(one - exact).max() <= 2e-5 * np.abs(exact).max()


@pytest.mark.parametrize("kind", [Shared, Multiple])
def test_a_number_that_is_another_in_each_piece_gives_no_state(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    manifest = converted(kind().eval(), kind.others, tmp_path / "a")
    assert manifest.status == "ok" and manifest.streaming.passed is None
    assert not manifest.states
