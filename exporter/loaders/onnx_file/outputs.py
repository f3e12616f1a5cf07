"""Shapes of the outputs of an ONNX graph in terms of its dynamic dimensions, seen by running it.

Files state them in many ways: not at all, or with a name for each axis of each output. A size of
an output that follows one dimension, whatever the others are, is that dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

STEPS = (1, 28, -1)
"""Changes of a size tried in turn, its double last; 100 and 28 are a multiple of most strides."""

Shape = tuple[int | str | None, ...]
Run = Callable[[Mapping[str, int]], Sequence[torch.Tensor]]


def output_shapes(run: Run, sizes: Mapping[str, int]) -> list[Shape]:
    """A shape for each output: dimension names, sizes that never change, None for the others.

    ``run`` runs the model at given sizes of its dimensions and may raise; at ``sizes`` it does not.
    """
    before = [tuple(y.shape) for y in run(sizes)]
    found: list[list[int | str | None]] = [list(shape) for shape in before]
    for name in sizes:
        after = _changed(run, sizes, name)
        if after is None:
            continue
        step, shapes = after
        for output, (old, new) in enumerate(zip(before, shapes, strict=True)):
            if len(old) != len(new):
                continue
            for axis, (a, b) in enumerate(zip(old, new, strict=True)):
                if a != b:
                    follows = b - a == step and a == sizes[name]
                    first = isinstance(found[output][axis], int)
                    found[output][axis] = name if follows and first else None
    return [tuple(shape) for shape in found]


def _changed(
    run: Run, sizes: Mapping[str, int], name: str
) -> tuple[int, list[tuple[int, ...]]] | None:
    """Shapes where one dimension is another size, and by how much."""
    for step in (*STEPS, sizes[name]):
        if sizes[name] + step < 1:
            continue
        try:
            return step, [tuple(y.shape) for y in run({**sizes, name: sizes[name] + step})]
        except Exception:  # a size the model does not take
            continue
    return None
