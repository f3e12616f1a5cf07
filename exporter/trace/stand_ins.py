"""Functions of torch that others stand in for while a module is traced.

    solve_triangular(A, B)        A^-1 B, see ``inverses``
    max_pool1d(x, ...)            max_pool1d_with_indices(x, ...)[0]
    take_along_dim(x, i, dim)     gather(x, dim, i), after both are broadcast

In torch 2.13 the export of the last two fixes the sizes of their inputs to those of the example.
"""

from __future__ import annotations

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
        return STAND_INS.get(function, function)(*args, **(kwargs or {}))


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


STAND_INS: dict[Any, TorchCallable] = {
    **SOLVERS,
    **dict.fromkeys((torch.max_pool1d, F.max_pool1d), _max_pool1d),
    **dict.fromkeys((torch.take_along_dim, Tensor.take_along_dim), _take_along_dim),
}
"""Functions, and what stands in for each."""
