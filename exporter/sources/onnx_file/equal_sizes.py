"""Which dynamic sizes of an ONNX graph are the same, where its names do not say.

    x (batch, seq, C), mask (batch, seq)    runs at no batch but seq    ->    mask (seq, seq)

Exporters name each dynamic size of each input anew, or none at all. A graph that does not run where
all dimensions differ has more of them in common: the assignment with the most dimensions that runs
at two sets of sizes, all different, is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx
import torch

from linexport.graph.dims import DimRange, Shape, batch_dims
from linexport.sources.onnx_file.dynamic_shapes import AXES, drawer, inputs

PRIMES = ((2, 5, 7, 11, 13, 3), (3, 7, 4, 6, 10, 9))
"""Sizes of the dimensions, all different."""

MOST_PLACES = len(PRIMES[0])
"""Dynamic places of all inputs together up to which assignments are tried: they have 203."""

Groups = tuple[int, ...]
"""The dimension of each dynamic place, by number, in order of appearance."""


def fitted(
    model: onnx.ModelProto,
    module: torch.nn.Module,
    shapes: Sequence[Shape],
    dims: Mapping[str, DimRange],
    seed: int,
) -> tuple[Sequence[Shape], dict[str, DimRange]]:
    """Return the shapes with one name for sizes that have to be the same, and the dimensions.

    They are as given where the graph runs so, or where no assignment is found.

    Args:
        model: the graph.
        module: runs it.
        shapes: of the inputs, with names for dynamic sizes.
        dims: by name.
        seed: of the inputs that are tried.
    """
    places = [name for shape in shapes for name in shape if isinstance(name, str)]
    if len(dims) < 2 or len(places) > MOST_PLACES:
        return list(shapes), dict(dims)
    stated = _numbered(places)
    if _runs(model, module, shapes, stated, seed):
        return list(shapes), dict(dims)
    named = [d.dim_param for v in inputs(model) for d in v.type.tensor_type.shape.dim]
    if any(named):  # sizes that have one name are the same
        candidates = [g for g in _groups(len(places)) if _joins(stated, g)]
    else:
        candidates = list(_groups(len(places)))
    for groups in sorted(candidates, key=lambda g: -max(g)):
        if groups != stated and _runs(model, module, shapes, groups, seed):
            return _renamed(shapes, places, groups, bool(any(named)))
    return list(shapes), dict(dims)


def _numbered(names: Sequence[str]) -> Groups:
    first = list(dict.fromkeys(names))
    return tuple(first.index(name) for name in names)


def _groups(places: int, used: int = 0) -> Iterator[Groups]:
    """Yield every way to divide places into dimensions."""
    if places == 0:
        yield ()
        return
    for number in range(used + 1):
        for rest in _groups(places - 1, max(used, number + 1)):
            yield (number, *rest)


def _joins(stated: Groups, groups: Groups) -> bool:
    """Return whether places of one dimension stay together."""
    return len({*zip(stated, groups, strict=True)}) == len({*stated})


def _runs(
    model: onnx.ModelProto,
    module: torch.nn.Module,
    shapes: Sequence[Shape],
    groups: Groups,
    seed: int,
) -> bool:
    numbers = iter(groups)
    named = [tuple(s if isinstance(s, int) else str(next(numbers)) for s in x) for x in shapes]
    draw, _ = drawer(model, named, seed)
    for primes in PRIMES:
        sizes = {str(number): primes[number] for number in groups}
        try:
            module(*draw(sizes))
        except Exception:  # ONNX Runtime has no common error
            return False
    return True


def _renamed(
    shapes: Sequence[Shape], places: Sequence[str], groups: Groups, named: bool
) -> tuple[Sequence[Shape], dict[str, DimRange]]:
    axes: dict[int, set[int]] = {}
    numbers = iter(groups)
    for shape in shapes:
        for axis, size in enumerate(shape):
            if isinstance(size, str):
                axes.setdefault(next(numbers), set()).add(axis)
    if named:
        names = dict(reversed([*zip(groups, places, strict=True)]))
    else:  # the batch leads and is nowhere else
        leading = [number for number, found in axes.items() if found == {0}][:1]
        others = [number for number in axes if number not in leading]
        names = dict.fromkeys(leading, AXES[0]) | {
            number: f"dim_{place}" if place > 1 else AXES[1]
            for place, number in enumerate(others, 1)
        }
    numbers = iter(groups)
    made = [
        tuple(s if isinstance(s, int) else names[next(numbers)] for s in shape) for shape in shapes
    ]
    batch = batch_dims({names[n]: a for n, a in axes.items()})
    return made, {name: DimRange(batch=name in batch) for name in names.values()}
