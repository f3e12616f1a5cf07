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
        None where the shapes are not those of tensors, or of tuples, lists and dicts of them.
    """
    found = _shortened(args, dynamic_shapes, lengths or {})
    return None if found is None else (tuple(found[0]), tuple(found[1]))


def _shortened(value: Any, spec: Any, lengths: Mapping[int, int]) -> tuple[Any, Any] | None:
    """Return a tensor, or tuples, lists and dicts of them, and its shapes; see ``shortened``."""
    if isinstance(value, Tensor):
        return _of_tensor(value, spec, lengths)
    if isinstance(value, dict):
        if not isinstance(spec, dict) or spec.keys() != value.keys():
            return None
        inner = _shortened([*value.values()], [spec[key] for key in value], lengths)
        return inner and (
            dict(zip(value, inner[0], strict=True)),
            dict(zip(value, inner[1], strict=True)),
        )
    plain = isinstance(value, tuple | list) and not hasattr(value, "_fields")
    if not plain or not isinstance(spec, tuple | list) or len(value) != len(spec):
        return None
    pairs = [_shortened(*pair, lengths) for pair in zip(value, spec, strict=True)]
    found = [pair for pair in pairs if pair is not None]
    if len(found) < len(pairs):
        return None
    return type(value)(x for x, _ in found), type(value)(shape for _, shape in found)


def _of_tensor(
    value: Tensor, spec: Any, lengths: Mapping[int, int]
) -> tuple[Tensor, dict[int, Any]] | None:
    dims = dict(enumerate(spec)) if isinstance(spec, tuple | list) else dict(spec or {})
    dims = {axis: dim for axis, dim in dims.items() if dim is not None}
    if any(not isinstance(axis, int) for axis in dims):
        return None
    for axis, dim in dims.items():
        unit = unit_of(dim)
        length = lengths.get(value.shape[axis], min(STEPS * unit, value.shape[axis]))
        if unit > 1 and length != value.shape[axis]:
            length = max(2, -(-length // unit)) * unit  # torch fixes what is 1 in the example
        value = resized(value, axis, length)
        dims[axis] = unit * Dim(dim.root.__name__) if unit > 1 else Dim.DYNAMIC
    return value.contiguous(), dims


def unit_of(dim: Any) -> int:
    """Return 64 of a dimension 64 n; 1 of another."""
    return int(dim.fn(1)) if hasattr(dim, "root") else 1


def resized(value: Tensor, axis: int, length: int) -> Tensor:
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
            dim, step, width = step_of(args[1], args[0].dim())
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
