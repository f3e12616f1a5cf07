"""Functions that fix sizes when torch exports them are exported for any length."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from linexport.sources.factory import load_module
from linexport.trace import trace
from tests.support.pieces import rewritten

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 6


def places(x: Tensor) -> Tensor:
    return (torch.arange(x.shape[1]) - 3).clamp(min=0)[None, :, None]


def triangle(x: Tensor) -> Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()


def later(x: Tensor) -> Tensor:
    """Return a mask of which the last query sees no key."""
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)


def heads(x: Tensor, count: int) -> Tensor:
    return x[..., : 2 * count].unflatten(-1, (count, 2)).transpose(1, 2)


def of_groups(x: Tensor) -> Tensor:
    """Attention within two groups of one batch, each of two heads."""
    groups = torch.stack([x, x.sin()], 1).unflatten(-1, (2, 3)).transpose(2, 3)
    mask = triangle(x)[None, None, None].expand(x.shape[0], 2, 1, -1, -1)
    found = F.scaled_dot_product_attention(groups, groups.cos(), groups, mask)
    return found.sum(1).transpose(1, 2).flatten(2)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "maxima of a window": lambda x: F.max_pool1d(F.pad(x.mT, (4, 0)), 5, 1).mT,
    "maxima of steps": lambda x: nn.MaxPool1d(3, stride=2, padding=1, ceil_mode=True)(x.mT).mT,
    "where maxima are": lambda x: x + F.max_pool1d(x.mT, 3, 1, 1, return_indices=True)[1].mT,
    "of the tensor's own": lambda x: x.take_along_dim(places(x).expand_as(x), 1),
    "broadcast": lambda x: torch.take_along_dim(x, places(x), dim=-2),
    "other broadcast": lambda x: torch.take_along_dim(x[:1, :, :1], places(x).expand_as(x), dim=1),
    "flattened": lambda x: torch.take_along_dim(x, 2 * torch.arange(3 * x.shape[1])),
}


ATTENTION: dict[str, Callable[[Tensor], Tensor]] = {
    "without heads": lambda x: F.scaled_dot_product_attention(
        x, x.sin(), x, is_causal=True, scale=0.5
    ),
    "with a mask": lambda x: F.scaled_dot_product_attention(
        x, x.sin(), x, triangle(x).expand(x.shape[0], -1, -1)
    ),
    "of rows": lambda x: x + F.scaled_dot_product_attention(x[0], x[-1].sin(), x[-1], triangle(x)),
    "of groups": of_groups,
    "of shared keys": lambda x: F.scaled_dot_product_attention(
        heads(x, 3), heads(x.sin(), 1), heads(x, 1), is_causal=True, enable_gqa=True
    ).flatten(1, 2),
    "of rows that see no key": lambda x: F.scaled_dot_product_attention(x, x, x, later(x)),
    "of a first row that is filled": lambda x: F.scaled_dot_product_attention(
        x, x, x, torch.full((x.shape[1],) * 2, -torch.inf, dtype=x.dtype).triu()
    ),
    "of rows whose mask is infinite": lambda x: F.scaled_dot_product_attention(
        x, x, x, torch.zeros(later(x).shape, dtype=x.dtype).masked_fill(~later(x), -torch.inf)
    ),
}


class Applied(nn.Module):
    """One of the functions."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = (FUNCTIONS | ATTENTION)[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _sized(sizes: torch.Size) -> torch.Size:
    if not isinstance(sizes, torch.Size):
        raise TypeError(f"expected torch.Size, found {type(sizes)}")
    return sizes


REST = (-1,)
IMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "1d": lambda x: F.adaptive_avg_pool1d(x.flatten(2), 5),
    "2d": nn.AdaptiveAvgPool2d((3, 4)),
    "2d of one size": lambda x: F.adaptive_avg_pool2d(x, 7),
    "2d of one axis": nn.AdaptiveAvgPool2d((None, 3)),
    "2d beside a mean": nn.AdaptiveAvgPool2d((1, 3)),
    "3d": lambda x: F.adaptive_avg_pool3d(x[:, None], (2, 3, 2)),
    "maxima 1d": nn.Sequential(nn.Flatten(2), nn.AdaptiveMaxPool1d(5)),
    "maxima 2d": nn.AdaptiveMaxPool2d((3, 4)),
    "maxima 2d of one axis": lambda x: F.adaptive_max_pool2d(x, (1, 3)),
    "maxima 3d": lambda x: F.adaptive_max_pool3d(x[:, None], (2, 3, 2)),
    "one maximum": nn.AdaptiveMaxPool2d(1),
    "number of pixels": lambda x: x.reshape(*x.shape[:2], x.shape[2:].numel()).softmax(-1),
    "sizes by their class": lambda x: x.flatten(2).expand(_sized(x.shape[:2]) + REST) * 2,
    "more sizes": lambda x: x / (x.shape + REST).numel() / (REST + x.shape[2:]).numel(),
    "number of values": lambda x: x.flatten() / x.size().numel(),
    "half": lambda x: F.adaptive_avg_pool2d(x.half(), 3),
}


class OfImages(Applied):
    def __init__(self, name: str) -> None:
        nn.Module.__init__(self)
        self.function = IMAGES[name]


@pytest.mark.parametrize("name", IMAGES)
def test_a_function_of_images_is_exported_for_any_size(name: str) -> None:
    shapes = ({0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC},)
    traced = trace(load_module((OfImages(name), (torch.randn(2, 4, 9, 6),), shapes), name))
    session = onnxruntime.InferenceSession(traced.model.SerializeToString())
    for batch, height, width in ((1, 7, 8), (3, 2, 3), (2, 31, 64)):
        x = torch.randn(batch, 4, height, width)
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        expected = IMAGES[name](x)
        limit = 2e-3 if expected.dtype == torch.float16 else 1e-5
        np.testing.assert_allclose(got, expected.numpy(), rtol=0, atol=limit)


def results(name: str) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Yield what a graph gives, and its inputs, at several sizes."""
    model = rewritten(Applied(name), torch.randn(2, 40, WIDTH))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for batch, length in ((1, 1), (3, 17), (2, 64)):
        x = torch.randn(batch, length, WIDTH)
        (given,) = session.get_inputs()
        (got,) = session.run(None, {given.name: x.numpy()})
        yield got, x


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_fixes_sizes_is_exported_for_any(name: str) -> None:
    for got, x in results(name):
        np.testing.assert_array_equal(got, FUNCTIONS[name](x).numpy())


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_of_any_number_of_axes_is_exported(name: str) -> None:
    for got, x in results(name):
        expected = ATTENTION[name](x.double()).numpy()
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


class Biased(nn.Module):
    """Scores with a bias that is read from weights."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.register_buffer("biases", torch.tensor([0.5, -2.0, 0.25, least]))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        bias = self.biases[(places[:, None] - places).abs().clamp(max=3)]
        return F.scaled_dot_product_attention(x, x.sin(), x, bias)


@pytest.mark.parametrize("least, cleaned", [(-1e9, False), (-torch.inf, True)])
def test_weights_are_looked_at_for_rows_that_see_nothing(least: float, cleaned: bool) -> None:
    module = Biased(least)
    model = rewritten(module, torch.randn(2, 9, WIDTH))
    assert ("IsNaN" in {node.op_type for node in model.graph.node}) == cleaned
    session, x = onnxruntime.InferenceSession(model.SerializeToString()), torch.randn(1, 30, WIDTH)
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = module.double()(x.double()).detach().numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
