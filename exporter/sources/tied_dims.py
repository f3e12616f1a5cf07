"""Sizes that are given as independent, ``Dim.DYNAMIC`` each, and that vary together alone.

Keys and values of a cache have one length. torch sees two where nothing in the code compares them:
the module is run with one of them longer, and with all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any

from linexport.sources.default_dims import Runs, map_tensors
from linexport.system.untyped import Positional

if TYPE_CHECKING:
    import torch


def tied(args: Positional, shapes: Any, runs: Runs) -> Any:
    """Return dynamic shapes in which sizes that vary together alone are one ``Dim``.

    Sizes are tried that are equal in the examples and along the same axis, behind the batch.

    Args:
        args: example inputs.
        shapes: of them, one entry for each, in torch.export's notation.
        runs: runs the module.
    """
    from torch.export import Dim

    groups: dict[tuple[int, int], dict[int, torch.Tensor]] = {}

    def note(tensor: torch.Tensor, marks: dict[int, Any]) -> dict[int, Any]:
        for axis, mark in marks.items():
            if mark is Dim.DYNAMIC and 0 < axis < tensor.dim():
                groups.setdefault((axis, tensor.shape[axis]), {})[id(tensor)] = tensor
        return marks

    def shared(tensor: torch.Tensor, marks: dict[int, Any]) -> dict[int, Any]:
        sizes = dict(enumerate(tensor.shape))
        return {
            axis: one.get((axis, sizes.get(axis, 0)), mark) if mark is Dim.DYNAMIC else mark
            for axis, mark in marks.items()
        }

    _of_each(args, shapes, note)
    one = {
        (axis, size): Dim(f"_{size}_along_{axis}")
        for (axis, size), group in groups.items()
        if len(group) > 1 and _is_one(args, list(group), axis, runs)
    }
    return _of_each(args, shapes, shared) if one else shapes


def _is_one(args: Positional, group: list[int], axis: int, runs: Runs) -> bool:
    """Return whether a module takes tensors that are longer along an axis only if all are."""

    def taken(chosen: Set[int]) -> bool:
        def longer(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.repeat_interleave(2, axis) if id(tensor) in chosen else tensor

        return runs(map_tensors(args, longer)) is not None

    return not taken({group[0]}) and taken(set(group))


def _of_each(
    value: Any, spec: Any, function: Callable[[torch.Tensor, dict[int, Any]], dict[int, Any]]
) -> Any:
    """Return dynamic shapes with a function applied to each tensor and its dims by axis."""
    import torch

    if isinstance(value, torch.Tensor):
        if spec is None:
            return None
        return function(value, spec if isinstance(spec, dict) else dict(enumerate(spec)))
    if isinstance(value, dict) and isinstance(spec, dict):
        return {key: _of_each(value.get(key), part, function) for key, part in spec.items()}
    sequences = isinstance(value, tuple | list) and isinstance(spec, tuple | list)
    if sequences and len(value) == len(spec):
        pairs = zip(value, spec, strict=True)
        return type(spec)(_of_each(item, part, function) for item, part in pairs)
    return spec
