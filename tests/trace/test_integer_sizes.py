"""``int`` of sizes in the code of a model is a size while the model is traced."""

from __future__ import annotations

import builtins
import copy
from collections.abc import Callable

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from linexport.sources.factory import load_module
from linexport.trace import trace

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = 4
B, H, W = map(Dim, ("batch", "height", "width"))


def partition(x: Tensor) -> Tensor:
    """Cut an image (B, H, W, C) to windows, as Swin does."""
    b, h, w, c = x.shape
    x = x.view(b, h // WINDOW, WINDOW, w // WINDOW, WINDOW, c)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, WINDOW * WINDOW, c)


def reverse(windows: Tensor, h: int, w: int) -> Tensor:
    """Put windows together, as Swin does."""
    b = int(windows.shape[0] / (h * w / WINDOW / WINDOW))
    x = windows.view(b, h // WINDOW, w // WINDOW, WINDOW, WINDOW, -1)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, -1)


def mixed(x: Tensor) -> Tensor:
    """Mix the pixels of each window, of an image of whole windows."""
    windows = partition(x.permute(0, 2, 3, 1))
    scores = (windows @ windows.mT).softmax(-1)
    return reverse(scores @ windows, *x.shape[2:]).permute(0, 3, 1, 2)


def padded(x: Tensor) -> Tensor:
    """Mix the pixels of each window, of an image that is padded."""
    h, w = x.shape[2:]
    more = [(WINDOW - n % WINDOW) % WINDOW for n in (w, h)]
    return mixed(F.pad(x, (0, more[0], 0, more[1])))[:, :, :h, :w]


def smaller(x: Tensor) -> Tensor:
    """Halve the height, and take a third of the width."""
    h, w = int(x.shape[2] * 0.5), int(x.shape[3] / 3)
    assert isinstance(x.shape[1], int) and {int: 1}[builtins.int] and int("7") == 7
    return F.interpolate(x, size=(h, w), mode="nearest")


def rooted(x: Tensor) -> Tensor:
    """Mix the pixels of windows, whose side is the root of their area, as FLatten Transformer."""
    (h, w), windows = x.shape[2:], partition(x.permute(0, 2, 3, 1))
    side = int((h * w // ((h // WINDOW) * (w // WINDOW))) ** 0.5)
    pooled = F.avg_pool2d(windows.mT.unflatten(-1, (side, side)), 3, 1, 1).flatten(-2)
    return reverse(pooled.mT, h, w).permute(0, 3, 1, 2)


class Applied(nn.Module):
    """One of the functions, behind a convolution."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.convolution, self.function = nn.Conv2d(3, 5, 1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.convolution(x))


@pytest.mark.parametrize(
    ("function", "dims", "unit"),
    [
        (mixed, {2: WINDOW * H}, WINDOW),
        (rooted, {2: WINDOW * H}, WINDOW),
        (padded, {2: H}, 1),
        (smaller, {2: H, 3: W}, 1),
    ],
    ids=["windows", "roots", "padded", "smaller"],
)
def test_an_integer_of_sizes_varies(
    function: Callable[[Tensor], Tensor], dims: dict[int, Dim], unit: int
) -> None:
    torch.manual_seed(0)
    module, example = Applied(function).eval(), torch.randn(2, 3, 8, 12)
    traced = trace(load_module((module, (example,), ({0: B, **dims},)), "a:b"))
    assert "int" not in globals(), "the names of the file are as they were"
    session = onnxruntime.InferenceSession(traced.model.SerializeToString())
    exact = copy.deepcopy(module).double()
    for batch, height, width in ((1, 4, 3), (3, 17, 10), (5, 2, 23)):
        x = torch.randn(batch, 3, unit * height, width if 3 in dims else 12)
        with torch.no_grad():
            expected = exact(x.double()).numpy()
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        np.testing.assert_allclose(found, expected, atol=1e-5)
