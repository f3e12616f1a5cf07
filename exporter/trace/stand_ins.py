"""Functions of torch that others stand in for while a module is traced.

    solve_triangular(A, B)        A^-1 B, see ``inverses``
    max_pool1d(x, ...)            max_pool1d_with_indices(x, ...)[0]
    take_along_dim(x, i, dim)     gather(x, dim, i), after both are broadcast
    adaptive_avg_pool2d(x, k)     products with matrices of means, where sizes vary and k is not 1
    adaptive_max_pool2d(x, k)     maxima of masked values, there
    x.shape[2:].numel()           the product of the sizes

In torch 2.13 the export of all but the first fixes the sizes of their inputs to those of the
example.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from linexport.system.untyped import Keywords, Positional, TorchCallable
from linexport.trace.decompositions.triangular_inverse import SOLVERS


class StandIns(TorchFunctionMode):
    """Context in which calls of such functions go to what stands in for them."""

    def __torch_function__(
        self,
        function: TorchCallable,
        types: object,
        args: Positional = (),
        kwargs: Keywords | None = None,
    ) -> object:
        found = STAND_INS.get(function, function)(*args, **(kwargs or {}))
        if type(found) is torch.Size and any(isinstance(n, torch.SymInt) for n in found):
            return Sizes(found)
        return found


def _max_pool1d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> object:
    """Stands in for ``torch.nn.functional.max_pool1d``."""
    found = F.max_pool1d_with_indices(input, kernel_size, stride, padding, dilation, ceil_mode)
    return found if return_indices else found[0]


def _take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """Stands in for ``torch.take_along_dim``."""
    if dim is None:
        return input.flatten().gather(0, indices.flatten())
    one, other = input.narrow(dim, 0, 1), indices.narrow(dim, 0, 1)
    shape = list(torch.broadcast_shapes(one.shape, other.shape))
    sizes = [[*shape], [*shape]]
    for size, x in zip(sizes, (input, indices), strict=True):
        size[dim] = x.shape[dim]
    return input.expand(sizes[0]).gather(dim, indices.expand(sizes[1]))


def _cells(size: Any, count: int) -> tuple[Tensor, Tensor]:
    """Return which places are in each cell that adaptive pooling makes of an axis, and how many.

    The first is (size, count), the second (count,).
    """
    cells, places = torch.arange(count), torch.arange(size)
    start, end = cells * size // count, ((cells + 1) * size + count - 1) // count
    return (places[:, None] >= start) & (places[:, None] < end), end - start


def _means(input: Tensor, axis: int, count: int) -> Tensor:
    """Return the means of the cells of an axis, which torch adds up in float32."""
    inside, sizes = _cells(input.shape[axis], count)
    single = input.float() if input.dtype in HALVES else input
    means = inside.to(single.dtype) / sizes.to(single.dtype)
    return (single.movedim(axis, -1) @ means).movedim(-1, axis).to(input.dtype)


def _maxima(input: Tensor, axis: int, count: int) -> Tensor:
    """Return the maxima of the cells of an axis."""
    inside, _ = _cells(input.shape[axis], count)
    lowest = torch.full((), -torch.inf, dtype=input.dtype)
    spread = torch.where(inside, input.movedim(axis, -1).unsqueeze(-1), lowest)
    return spread.amax(-2).movedim(-1, axis)


def _pooling(
    rank: int, pool: TorchCallable, along: Callable[[Tensor, int, int], Tensor]
) -> TorchCallable:
    """Return what stands in for adaptive pooling.

    Args:
        rank: number of the dimensions that it pools.
        pool: the function.
        along: what it computes of one axis, of an input, the axis and the number of cells.
    """

    def pooled(input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
        given = output_size if isinstance(output_size, tuple | list) else [output_size] * rank
        counts = {-rank + i: count for i, count in enumerate(given) if count is not None}
        varying = [axis for axis in counts if isinstance(input.shape[axis], torch.SymInt)]
        if return_indices or all(counts[axis] == 1 for axis in varying):
            return pool(input, output_size, *([True] if return_indices else []))
        for axis, count in counts.items():
            input = along(input, axis, count)
        return input

    return pooled


class Sizes(tuple[Any, ...]):
    """The sizes of a tensor, whose product is a symbol: that of ``torch.Size`` is a number.

    ``torch.Size`` has no subclasses: code that asks for an instance of it is answered by the class
    that is told of.
    """

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Return ``torch.Size``."""
        return torch.Size

    def __repr__(self) -> str:
        """Return the text that ``torch.Size`` has."""
        return f"torch.Size({list(self)})"

    def numel(self) -> Any:
        """Return the product, as ``torch.Size.numel`` does."""
        return math.prod(self)

    def __getitem__(self, index: Any) -> Any:
        """Return a size, or some as sizes again."""
        found = super().__getitem__(index)
        return Sizes(found) if isinstance(index, slice) else found

    def __add__(self, other: Any) -> Any:
        """Return more sizes, as ``torch.Size`` does."""
        return Sizes(super().__add__(tuple(other)))

    def __radd__(self, other: Any) -> Any:
        """Return the sizes behind those of a tuple."""
        return Sizes((*other, *self))

    def __mul__(self, count: Any) -> Any:
        """Return the sizes so many times, as ``torch.Size`` does."""
        return Sizes(super().__mul__(count))


HALVES = (torch.float16, torch.bfloat16)
"""Types in which torch adds up in float32."""

STAND_INS: dict[Any, TorchCallable] = {
    **SOLVERS,
    **dict.fromkeys((torch.max_pool1d, F.max_pool1d), _max_pool1d),
    torch.adaptive_avg_pool1d: _pooling(1, torch.adaptive_avg_pool1d, _means),
    F.adaptive_avg_pool2d: _pooling(2, F.adaptive_avg_pool2d, _means),
    F.adaptive_avg_pool3d: _pooling(3, F.adaptive_avg_pool3d, _means),
    F.adaptive_max_pool1d: _pooling(1, F.adaptive_max_pool1d, _maxima),
    F.adaptive_max_pool2d: _pooling(2, F.adaptive_max_pool2d, _maxima),
    F.adaptive_max_pool3d: _pooling(3, F.adaptive_max_pool3d, _maxima),
    **dict.fromkeys((torch.take_along_dim, Tensor.take_along_dim), _take_along_dim),
}
"""Functions, and what stands in for each."""
