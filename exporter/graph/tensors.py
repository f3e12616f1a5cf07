"""Facts of one tensor of a graph: its shape, its sizes and its constant values."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from linexport.errors import BuildError
from linexport.graph.dims import Shape


class UnknownShapeError(BuildError):
    """A step needs a shape or a size that the graph does not state."""


class UnexpectedConstantError(BuildError):
    """A step needs a tensor that is computed, and the graph has a constant."""


def known_shape(tensor: gs.Tensor) -> Shape:
    """Return the shape of a tensor.

    Raises:
        UnknownShapeError: the graph states none. Callers search where shapes are complete, so
            that this is a fault of linexport.
    """
    if tensor.shape is None:
        raise UnknownShapeError(
            f"The graph states no shape of the tensor {tensor.name!r}; expected one after shape "
            "inference. This is a fault of linexport: report it with the model."
        )
    return tensor.shape


def static_size(tensor: gs.Tensor, axis: int) -> int:
    """Return the size of an axis that must be a number.

    Raises:
        UnknownShapeError: the shape is unknown, or the size dynamic.
    """
    size = known_shape(tensor)[axis]
    if not isinstance(size, int):
        raise UnknownShapeError(
            f"Axis {axis} of the tensor {tensor.name!r} has the dynamic size {size!r}; expected a "
            "number. This is a fault of linexport: report it with the model."
        )
    return size


def computed_value(tensor: gs.Tensor) -> gs.Variable:
    """Return a tensor that a node computes or the graph is given, whose type can be stated.

    Raises:
        UnexpectedConstantError: it is a constant.
    """
    if not isinstance(tensor, gs.Variable):
        raise UnexpectedConstantError(
            f"The tensor {tensor.name!r} is a constant; expected one that is computed. This is a "
            "fault of linexport: report it with the model."
        )
    return tensor


def constant_values(tensor: gs.Tensor) -> np.ndarray | None:
    """Return the values of a constant; None of a tensor that is computed."""
    return tensor.values if isinstance(tensor, gs.Constant) else None
