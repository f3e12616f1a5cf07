"""Draws of random maps: made once, from a seed, the same bytes on every machine.

Numbers come from numpy's PCG64 in float64 and are stored in float32. Nothing here calls BLAS or
LAPACK, whose rounding depends on the processor: rows are made orthogonal by Gram-Schmidt in
elementwise operations and sums over the first axis, which numpy adds row by row.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from linexport.models.feature_maps.base import Array


def generator(seed: int) -> np.random.Generator:
    """Return the NumPy generator that all draws of one map come from."""
    return np.random.Generator(np.random.PCG64(seed))


def frozen(draw: Callable[[], NDArray], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the result of ``draw`` as a buffer; on the meta device nothing is drawn."""
    if torch.get_default_device().type == "meta":
        return torch.empty(shape, dtype=dtype)
    values = draw()
    assert values.shape == shape
    return torch.tensor(values).to(dtype)


def gaussian(rng: np.random.Generator, count: int, width: int, orthogonal: bool) -> Array:
    """``count`` columns w ~ N(0, I) of ``width``, as (width, count).

    Orthogonal: columns are orthogonal within every block of ``width``, each still N(0, I) on its
    own: a uniform direction with a norm drawn from chi(width).
    """
    if not orthogonal:
        return rng.standard_normal((width, count))
    blocks = [_orthonormal(rng.standard_normal((width, width))) for _ in range(-(-count // width))]
    norms = np.sqrt((rng.standard_normal((width, count)) ** 2).sum(0))
    return np.concatenate(blocks, axis=1)[:, :count] * norms


def projection(width: int, count: int, seed: int, orthogonal: bool) -> Tensor:
    """``gaussian`` columns of one map, as its buffer."""
    rng = generator(seed)
    return frozen(lambda: gaussian(rng, count, width, orthogonal), (width, count), torch.float32)


def _orthonormal(columns: Array) -> Array:
    """Columns made orthonormal, one after another: uniform for Gaussian ones."""
    for _ in range(2):  # What rounding leaves of a nearly dependent column, the second time takes.
        for i in range(columns.shape[1]):
            unit = columns[:, i : i + 1]
            unit /= np.sqrt((unit * unit).sum(0))
            later = columns[:, i + 1 :]
            later -= unit * (unit * later).sum(0)
    return columns
