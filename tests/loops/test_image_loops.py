"""Loops over the pixels, the rows and the columns of images whose height and width vary."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim

import linexport

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("one_thread")]

IMAGES = ({0: Dim.DYNAMIC, 2: Dim("height", max=96), 3: Dim("width", max=96)},)

SIZES = ((3, 4, 6), (1, 9, 5), (2, 7, 7), (1, 1, 8), (1, 23, 18))
"""Batch, height and width of images that a conversion does not look at."""


class Pixels(nn.Module):
    """h_t = sigmoid(a_t) h_{t-1} + b_t over rows of pixels, from both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Conv2d(4, 8, 1)

    def forward(self, image):
        batch, channels, height, width = image.shape
        pixels = self.project(image).flatten(2)
        a, b = torch.stack([pixels, pixels.flip(-1)], 1).chunk(2, 2)
        h, out = image.new_zeros(batch, 2, channels), []
        for t in range(height * width):
            h = torch.sigmoid(a[..., t]) * h + b[..., t]
            out.append(h)
        forth, back = torch.stack(out, -1).unbind(1)
        return (forth + back.flip(-1)).view(batch, channels, height, width)


class PixelsOfReshaped(Pixels):
    """The same, where the number of pixels is a size of a tensor."""

    def forward(self, image):
        a, b = self.project(image).flatten(2).chunk(2, 1)
        h, out = torch.zeros_like(b[..., 0]), torch.empty_like(b)
        for t in range(b.shape[2]):
            h = torch.sigmoid(a[..., t]) * h + b[..., t]
            out[..., t] = h
        return out.view_as(image)


class Downsampled(Pixels):
    """A loop over the tokens of patches of 2 x 2 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, 4, 2, stride=2)

    def forward(self, image):
        return super().forward(self.patches(image))


class Stages(Pixels):
    """Loops over patches of 4 x 4 pixels, whose sides are taken as ``int``, and of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, 4, 4, stride=4)
        self.halves = nn.Conv2d(4, 4, 3, stride=2, padding=1)

    def forward(self, image):
        image = self.stem(image)
        height, width = int(image.shape[2]), int(image.shape[3])
        image = super().forward(image).flatten(2).view(image.shape[0], -1, height, width)
        return super().forward(self.halves(image))


class Volume(nn.Module):
    """A selective scan over the patches of an image, as U-Mamba writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.gates = nn.Conv2d(4, 4, 2, stride=2), nn.Linear(4, 4 + 2 * 3)
        self.rate, self.norm = nn.Parameter(torch.rand(4, 3)), nn.LayerNorm(4)

    def forward(self, image):
        image = self.patches(image)
        batch, channels, *sides = image.shape
        count = image.shape[2:].numel()
        u = self.norm(image.reshape(batch, channels, count).mT)
        step, b, c = self.gates(u).split([4, 3, 3], -1)
        step = nn.functional.softplus(step)[..., None]
        decay, added = torch.exp(-step * self.rate), step * b[:, :, None] * u[..., None]
        h, out = torch.zeros_like(added[:, 0]), []
        for t in range(count):
            h = decay[:, t] * h + added[:, t]
            out.append(torch.einsum("bdn,bn->bd", h, c[:, t]))
        return image + torch.stack(out, 1).mT.reshape(batch, channels, *sides)


class RowsThenColumns(Pixels):
    """A loop over the rows, and one over the columns of what it gives."""

    def forward(self, image):
        for axis in (2, 3):
            a, b = self.project(image).chunk(2, 1)
            h, out = torch.zeros_like(b.select(axis, 0)), []
            for t in range(image.shape[axis]):
                h = torch.sigmoid(a.select(axis, t)) * h + b.select(axis, t)
                out.append(h)
            image = torch.stack(out, axis)
        return image


class Lines(nn.Module):
    """A pixel takes of its three neighbours in the line before, in two directions (GSPN)."""

    def __init__(self) -> None:
        super().__init__()
        self.shares, self.gate = nn.Conv2d(4, 12, 1), nn.Conv2d(4, 4, 1)

    def lines(self, image):
        batch, channels, height, width = image.shape
        shares = self.shares(image).view(batch, channels, 3, height, width).softmax(2)
        added, h, out = self.gate(image).sigmoid() * image, image.new_zeros(batch, 4, width), []
        for i in range(height):
            sides = nn.functional.pad(h, (1, 0))[..., :-1], h, nn.functional.pad(h, (0, 1))[..., 1:]
            h = sum(shares[:, :, n, i] * side for n, side in enumerate(sides)) + added[:, :, i]
            out.append(h)
        return torch.stack(out, 2)

    def forward(self, image):
        return self.lines(image) + self.lines(image.mT).mT


SCALES = {Downsampled: 2, Stages: 4, Volume: 2}
"""How many pixels of a side are one."""


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        (Pixels, (6, 10)),
        (PixelsOfReshaped, (2, 3)),
        (Downsampled, (6, 10)),
        (Stages, (6, 10)),
        (Volume, (3, 5)),
        (RowsThenColumns, (8, 8)),
        (Lines, (6, 5)),
    ],
    ids=str,
)
def test_loops_over_images_take_every_height_and_width(
    kind: type[nn.Module], size: tuple[int, int], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, scale = kind().eval(), SCALES.get(kind, 1)
    example = torch.randn(2, 4, *(scale * n for n in size))
    made = linexport.convert(
        model, (example,), dynamic_shapes=IMAGES, output=tmp_path / "made", bench=False
    )
    assert made.status == "ok" and bool(made.fused) == (kind is not Lines)
    artifact = linexport.load(tmp_path / "made", threads=1)
    exact = copy.deepcopy(model).double()
    for batch, height, width in SIZES:
        image = torch.randn(batch, 4, scale * height, scale * width)
        with torch.no_grad():
            expected = exact(image.double()).numpy()
        (found,) = artifact.run(image.numpy()).values()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
