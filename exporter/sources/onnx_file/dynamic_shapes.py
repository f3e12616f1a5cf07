"""Dynamic dimensions of an ONNX graph, and example inputs at sizes that it runs at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

from linexport.errors import UnsupportedModelError
from linexport.graph.dims import DimRange, Shape, batch_dims
from linexport.sources.onnx_file.added_masks import is_added_mask
from linexport.sources.onnx_file.index_ranges import index_range
from linexport.sources.onnx_file.module import reason

BATCH = 2
TRIED_LENGTHS = (100, 64, 128, 224, 16, 1)
"""Tried in turn for dimensions that are not the batch, until the model runs: the first is several
chunks of a usual size and a multiple of none."""

MOST_VALUES = 2**28
"""In all inputs together at sizes that a user asks for: 1 GiB of float32."""

MOST_CHOSEN = 2**26
"""In all example inputs together at the sizes tried here: 256 MiB of float32, several times over
while the model runs."""

BLOCK = 2**20
"""Values drawn at a time, since NumPy draws float64 whatever the dtype."""

MASKED = -1e4
"""Added to the score of a pair that a mask excludes; float16 has it."""

AXES = {0: "batch", 1: "seq"}


@dataclass(frozen=True)
class Examples:
    """How to draw inputs, sizes of the dimensions that the model runs at, ranges of integers."""

    draw: Callable[[Mapping[str, int]], tuple[torch.Tensor, ...]]
    sizes: Mapping[str, int]
    integer_ranges: dict[int, tuple[int, int]]


def interface(model: onnx.ModelProto) -> tuple[Sequence[Shape], dict[str, DimRange]]:
    """Shapes of the inputs with names for dynamic sizes, and the dimensions by name.

    A size without a name is called batch, seq or dim_N after its axis, and so taken to be the same
    in all inputs.

    Raises:
        UnsupportedModelError: an input that is not a tensor, or whose rank is not stated.
    """
    shapes: list[Shape] = []
    axes: dict[str, set[int]] = {}
    for value in inputs(model):
        if not value.type.tensor_type.HasField("shape"):
            raise UnsupportedModelError(f"the input {value.name} is not a tensor of a stated rank")
        shape: list[int | str] = []
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            # Some tools write a dynamic size as -1.
            if dim.HasField("dim_value") and dim.dim_value >= 0:
                shape.append(dim.dim_value)
                continue
            name = dim.dim_param or AXES.get(axis, f"dim_{axis}")
            axes.setdefault(name, set()).add(axis)
            shape.append(name)
        shapes.append(tuple(shape))
    leading = batch_dims(axes)
    return shapes, {name: DimRange(batch=name in leading) for name in axes}


def inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Inputs of the graph; those that have an initializer are weights in the style of old files."""
    stored = {t.name for t in model.graph.initializer}
    return [i for i in model.graph.input if i.name not in stored]


def examples(
    model: onnx.ModelProto,
    module: torch.nn.Module,
    shapes: Sequence[Shape],
    dims: Mapping[str, DimRange],
    seed: int,
) -> Examples:
    """Inputs at the first sizes the model runs at.

    Raises:
        UnsupportedModelError: it runs at none of them.
    """
    draw, ranges = drawer(model, shapes, seed)
    failure: Exception | None = None
    candidates = list(_sizes(dims))
    small = [sizes for sizes in candidates if _values(shapes, sizes) <= MOST_CHOSEN]
    if not small:
        raise UnsupportedModelError(
            f"its inputs have {_values(shapes, candidates[-1]):,} values at the smallest sizes "
            f"tried; at most {MOST_CHOSEN:,} are drawn"
        )
    for sizes in small:
        try:
            module(*draw(sizes))
        except Exception as error:  # ONNX Runtime has no common error
            failure = failure or error
            continue
        return Examples(draw, sizes, ranges)
    assert failure is not None
    raise UnsupportedModelError(
        f"ONNX Runtime runs it at none of the sizes tried ({reason(failure)})"
    )


def drawer(
    model: onnx.ModelProto, shapes: Sequence[Shape], seed: int
) -> tuple[Callable[[Mapping[str, int]], tuple[torch.Tensor, ...]], dict[int, tuple[int, int]]]:
    """Return a function that draws inputs at any sizes, and the ranges of integers."""
    given = inputs(model)
    types = [value.type.tensor_type.elem_type for value in given]
    ranges = {
        i: index_range(model, value.name) or (0, 2)
        for i, (value, kind) in enumerate(zip(given, types, strict=True))
        if np.issubdtype(helper.tensor_dtype_to_np_dtype(kind), np.integer)
    }

    masks = {i for i, value in enumerate(given) if is_added_mask(model, value.name)}

    def draw(sizes: Mapping[str, int]) -> tuple[torch.Tensor, ...]:
        random = np.random.default_rng(seed)
        needed = _values(shapes, sizes)
        if needed > MOST_VALUES:
            raise UnsupportedModelError(f"its inputs have {needed} values")
        return tuple(
            _array(random, size, kind, ranges.get(i), masked=i in masks)
            for i, (shape, kind) in enumerate(zip(shapes, types, strict=True))
            for size in [[s if isinstance(s, int) else sizes[s] for s in shape]]
        )

    return draw, ranges


def _values(shapes: Sequence[Shape], sizes: Mapping[str, int]) -> int:
    return sum(prod(s if isinstance(s, int) else sizes[s] for s in shape) for shape in shapes)


def _sizes(dims: Mapping[str, DimRange]) -> Iterator[dict[str, int]]:
    tried = []
    for batch in (BATCH, 1):
        for length in TRIED_LENGTHS:
            sizes = {name: batch if limits.batch else length for name, limits in dims.items()}
            if sizes not in tried:
                tried.append(sizes)
                yield sizes


def _array(
    random: np.random.Generator,
    shape: list[int],
    kind: int,
    integers: tuple[int, int] | None,
    masked: bool,
) -> torch.Tensor:
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    if integers is not None:
        return torch.from_numpy(random.integers(*integers, shape).astype(dtype))
    if kind == TensorProto.BOOL:
        return torch.ones(shape, dtype=torch.bool)
    if masked and len(shape) > 1:  # the later tokens, of which none is seen
        return torch.from_numpy(np.triu(np.full(shape, MASKED, dtype), 1))
    values = np.empty(shape, dtype)
    flat = values.reshape(-1)
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK]
        block[:] = random.standard_normal(block.size)
    return torch.from_numpy(values)
