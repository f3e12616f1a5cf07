"""Stable sorts, which torch's exporter does not translate: ONNX's TopK of all elements.

Of equal elements TopK gives the one of the lower index first, in either direction.
"""

from __future__ import annotations

from typing import Any

from onnx import TensorProto
from onnxscript import values

OPSET = 20


def in_order(
    x: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> object:
    """Write ``aten.sort.stable`` as nodes of a graph: the sorted elements, and their indices."""
    op = values.Opset("", OPSET)
    of_bool = x.dtype is not None and int(x.dtype) == TensorProto.BOOL
    given = op.Cast(x, to=TensorProto.INT32) if of_bool else x
    start = dim if dim >= 0 else dim + len(x.shape)
    count = op.Shape(given, start=start, end=start + 1)
    found, indices = op.TopK(given, count, axis=dim, largest=int(descending), sorted=1)
    return (op.Cast(found, to=TensorProto.BOOL) if of_bool else found), indices
