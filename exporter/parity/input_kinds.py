"""Values drawn like an example: of its kind, and within its range where it is bounded.

    sorted         ascending or descending along the tokens, as times and positions are: steps are
                   those of the example, integers within its range
    a mask         booleans, true from one end where those of the example are
    probabilities  not negative, with rows that sum to 1, or with a single 1
    bounded        of one sign, or all between -1 and 1: between two values of the example

An example of normal values has none of these but by chance, see ``sources.bounds``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from linexport.sources.bounds import UNLIKELY, bounds_of

SUMS_TO_ONE = 1e-4
"""Error of a sum of probabilities."""

SHORTEST_ORDER = 3
"""Values in order at least: each of a batch of two is above or below the other."""

MOSTLY, RARELY = 0.8, 0.2
"""Shares of true values in masks, by what most values of the example are."""


def draw_like(
    example: Tensor, dims: Sequence[int | str], shape: Sequence[int], generator: torch.Generator
) -> Tensor | None:
    """Return values of the kind that an example has; None where it has none.

    Args:
        example: it.
        dims: its sizes, dynamic ones by name.
        shape: of the values.
        generator: of random numbers.
    """
    if not example.numel() or example.is_complex() or not bool(example.isfinite().all()):
        return None
    axis, direction = _order(example, dims)
    if example.dtype == torch.bool:
        return _booleans(example, shape, axis, direction, generator)
    if direction:
        return _sorted(example, shape, axis, direction, generator)
    if not example.is_floating_point():
        return None
    along = _sums_to_one(example)
    if along is not None:
        return _probabilities(example, shape, along, generator)
    return None if bounds_of(example) is None else _between(example, shape, generator)


def _order(example: Tensor, dims: Sequence[int | str]) -> tuple[int, int]:
    """Return the axis that values are sorted along, and 1 ascending or -1; 0 where along none.

    Axes that vary are looked at first, the last of them before others.
    """
    places = sorted(range(len(dims)), key=lambda place: (isinstance(dims[place], str), place))
    for axis in reversed(places):
        direction = _direction(example, axis)
        if direction:
            return axis, direction
    return 0, 0


def _direction(example: Tensor, axis: int) -> int:
    """Return 1 of values that ascend along an axis, -1 where they descend, 0 of others."""
    size = example.shape[axis]
    if size < SHORTEST_ORDER:
        return 0
    steps = example.movedim(axis, -1).to(torch.float64).diff(dim=-1)
    # So many random rows are all in one of the two orders with this probability.
    rows = int((steps != 0).any(-1).sum())
    chance = math.log(2) - rows * math.lgamma(size + 1)
    if example.dtype == torch.bool and rows:
        chance = math.prod(steps.shape[:-1]) * (math.log(2 * size) - size * math.log(2))
    if chance > math.log(UNLIKELY):
        return 0
    return 1 if bool((steps >= 0).all()) else -1 if bool((steps <= 0).all()) else 0


def _booleans(
    example: Tensor,
    shape: Sequence[int],
    axis: int,
    direction: int,
    generator: torch.Generator,
) -> Tensor:
    share = MOSTLY if float(example.float().mean()) >= 0.5 else RARELY
    drawn = torch.rand(tuple(shape), generator=generator) < share
    if not direction:
        return drawn
    drawn = drawn.sort(dim=axis, descending=direction < 0).values
    first = drawn.movedim(axis, 0)[0 if direction < 0 else -1]
    first.fill_(True)  # a row that is masked as a whole has nothing
    return drawn


def _sorted(
    example: Tensor, shape: Sequence[int], axis: int, direction: int, generator: torch.Generator
) -> Tensor:
    if not example.is_floating_point():
        low, high = int(example.min()), int(example.max()) + 1
        drawn = torch.randint(low, high, tuple(shape), generator=generator, dtype=example.dtype)
        return drawn.sort(dim=axis, descending=direction < 0).values
    steps = example.diff(dim=axis).flatten()
    starts = example.movedim(axis, 0)[0].flatten()
    drawn = _chosen(steps, shape, generator)
    drawn.movedim(axis, 0)[0] = _chosen(starts, drawn.movedim(axis, 0)[0].shape, generator)
    return drawn.cumsum(axis)


def _sums_to_one(example: Tensor) -> int | None:
    """Return the axis along which values are probabilities, the last of several."""
    if bool((example < 0).any()):
        return None
    for axis in reversed(range(example.dim())):
        sums = example.sum(axis)
        if example.shape[axis] > 1 and bool(((sums - 1).abs() <= SUMS_TO_ONE).all()):
            return axis
    return None


def _probabilities(
    example: Tensor, shape: Sequence[int], axis: int, generator: torch.Generator
) -> Tensor:
    drawn = torch.rand(tuple(shape), generator=generator, dtype=example.dtype).clamp(min=1e-9)
    if bool(((example == 0) | (example == 1)).all()):
        return torch.zeros_like(drawn).scatter_(axis, drawn.argmax(axis, keepdim=True), 1.0)
    drawn = -drawn.log()
    return drawn / drawn.sum(axis, keepdim=True)


def _between(example: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return numbers between two values of the example each."""
    values = example.flatten()
    share = torch.rand(tuple(shape), generator=generator, dtype=example.dtype)
    first, second = _chosen(values, shape, generator), _chosen(values, shape, generator)
    return first + share * (second - first)


def _chosen(values: Tensor, shape: Sequence[int], generator: torch.Generator) -> Tensor:
    return values[torch.randint(len(values), tuple(shape), generator=generator)]
