"""Examples as long as a few steps of a loop take, be it over tokens or over slices of them.

    for t in range(0, x.shape[1], 64):        a step takes x[:, t : t + 64]: seven take 448 tokens

Of a size that a loop counts to torch reads the value, which does not say how many of its
tokens are one step. A run of the model on its example shows the slices.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim
from torch.overrides import TorchFunctionMode

from linexport.system.untyped import Keywords, Positional, TorchCallable
from linexport.trace.loops.capture import LONGEST_CHUNK, STEPS, step_of


def shortened(
    args: tuple[object, ...], dynamic_shapes: object, lengths: Mapping[int, int] | None = None
) -> tuple[tuple[object, ...], object] | None:
    """Cut examples to ``STEPS`` along their dynamic dimensions, or make them as long as need be.

    Args:
        args: the examples.
        dynamic_shapes: an entry for each.
        lengths: sizes to use in place of those of the examples.

    Returns:
        The arguments and their dynamic shapes, without limits; multiples of a number are kept.
        None where the shapes are not those of plain tensors.
    """
    if not isinstance(dynamic_shapes, tuple | list) or len(args) != len(dynamic_shapes):
        return None
    cut: list[object] = []
    shapes: list[object] = []
    for value, spec in zip(args, dynamic_shapes, strict=True):
        dims = dict(enumerate(spec)) if isinstance(spec, tuple | list) else dict(spec or {})
        dims = {axis: dim for axis, dim in dims.items() if dim is not None}
        if not isinstance(value, Tensor) or any(not isinstance(axis, int) for axis in dims):
            return None
        for axis, dim in dims.items():
            unit = _unit(dim)
            length = min(STEPS * unit, value.shape[axis])
            length = (lengths or {}).get(value.shape[axis], length)
            value = _resized(value, axis, length)
            dims[axis] = unit * Dim(dim.root.__name__) if unit > 1 else Dim.DYNAMIC
        cut.append(value.contiguous())
        shapes.append(dims)
    return tuple(cut), tuple(shapes)


def _unit(dim: Any) -> int:
    """Return 64 of a dimension 64 n; 1 of another."""
    return int(dim.fn(1)) if hasattr(dim, "root") else 1


def _resized(value: Tensor, axis: int, length: int) -> Tensor:
    """Return an example of a length, repeated as often as need be."""
    repeated = torch.cat([value] * -(-length // value.shape[axis]), axis)
    return repeated.narrow(axis, 0, length)


class Slices(TorchFunctionMode):
    """Notes the slices that are taken of tensors, by the size of their dimension and the width."""

    def __init__(self) -> None:
        super().__init__()
        self.starts: dict[tuple[int, int], set[int]] = {}

    def __torch_function__(
        self,
        function: TorchCallable,
        types: object,
        args: Positional = (),
        kwargs: Keywords | None = None,
    ) -> object:
        if function in (Tensor.__getitem__, Tensor.__setitem__):
            dim, step, width = step_of(args[1])
            if step is not None and width > 1 and dim < args[0].dim():
                self._note(args[0].shape[dim], width, [step])
        found = function(*args, **(kwargs or {}))
        if function in (torch.split, Tensor.split):
            widths = {(x.dim(), *x.shape) for x in found}
            pairs = zip(args[0].shape, found[0].shape, strict=True)
            changed = [pair for pair in pairs if pair[0] != pair[1]]
            if len(widths) == len(changed) == 1:
                self._note(*changed[0], range(len(found)))
        return found

    def _note(self, size: int, width: int, steps: Sequence[int]) -> None:
        self.starts.setdefault((size, width), set()).update(steps)

    def chunk(self, sizes: Collection[int]) -> tuple[int, int] | None:
        """Return a size of some, and the width of the slices that it was cut to throughout."""
        for (size, width), steps in self.starts.items():
            if size in sizes and size % width == 0 and steps == set(range(size // width)):
                return (size, width) if 1 < width <= min(LONGEST_CHUNK, size // 2) else None
        return None
