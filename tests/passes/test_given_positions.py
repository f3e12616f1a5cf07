"""What a model takes and returns: numbers of tokens that came before, and sums to go on from.

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


class Started(nn.Module):
    """Sums that go on from a given one, and the last of them."""

    others: tuple[Tensor, ...] = (torch.randn(2, WIDTH),)

    def forward(self, x: Tensor, start: Tensor) -> Outputs:
        sums = x.cumsum(1) + start[:, None]
        return sums.tanh(), sums[:, -1]


class OfAllRows(Started):
    """One start for all rows; the last sum is computed by itself."""

    others = (torch.randn(WIDTH),)

    def forward(self, x: Tensor, start: Tensor) -> Outputs:
        return start + x.cumsum(1), start + x.sum(1)


class Taken(Started):
    """A start that is taken away."""

    def forward(self, x: Tensor, start: Tensor) -> Outputs:
        return x.cumsum(1) - start[:, None], x.sum(1) - start


class ReadTwice(Started):
    """Sums with a start, and without it."""

    def forward(self, x: Tensor, start: Tensor) -> Outputs:
        sums = x.cumsum(1)
        return sums + (2 * start[:, None] + sums).tanh(), sums[:, -1]


class OfHeads(Started):
    """Tokens behind heads."""

    others = (torch.randn(2, 2, 1, WIDTH // 2),)

    def forward(self, x: Tensor, start: Tensor) -> Outputs:
        sums = start + x.unflatten(2, (2, -1)).transpose(1, 2).cumsum(2)
        return sums.transpose(1, 2).flatten(2), sums[:, :, -1:]


class Wider(Started):
    """A start that makes sums of one channel wider begins none of them."""

    def forward(self, x: Tensor, start: Tensor) -> Outputs:
        sums = x.sum(2, keepdim=True).cumsum(1) + start[:, None]
        return (sums, sums[:, -1])


class TakenFrom(Started):
    """The last sum is taken from the start, and the start from the sums."""

    def forward(self, x: Tensor, start: Tensor) -> Outputs:
        return x.cumsum(1) - start[:, None], start - x.sum(1)


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


COUNTED, STARTED = [Rotary, Rows, Mean, Summed], [Started, OfAllRows, Taken, ReadTwice, OfHeads]


@pytest.mark.parametrize("kind", [*COUNTED, *STARTED])
def test_what_is_given_and_returned_goes_on(kind: type[nn.Module], tmp_path: Path) -> None:
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
            later = [np.asarray(y + 3) for y in given]
            got = found.outputs(x, [n for n in pieces if n], given, later)
            for one, exact in zip(got, expected, strict=True):
                assert one.shape == exact.shape
                assert np.abs(one - exact).max() <= 2e-5 * np.abs(exact).max()


@pytest.mark.parametrize("kind", [Wider, TakenFrom])
def test_starts_of_another_form_are_added_in_each_call(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    module, (start,) = kind().eval(), kind.others
    assert converted(module, kind.others, tmp_path / "a").status == "ok"
    x = torch.randn(2, 30, WIDTH)
    got = Independent(tmp_path / "a").outputs(x.numpy(), [30], [start.numpy()])
    for one, exact in zip(got, module(x.double(), start.double()), strict=True):
        np.testing.assert_allclose(one, exact.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [Shared, Multiple])
def test_a_number_that_is_another_in_each_piece_gives_no_state(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    manifest = converted(kind().eval(), kind.others, tmp_path / "a")
    assert manifest.status == "ok" and manifest.streaming.passed is None
    assert not manifest.states
