"""Running maxima and minima, for which ONNX has no operator -> a Scan over the tokens.

m_t = max(m_{t-1}, x_t),   m_0 = -inf        values of ``cummax``
i_t = max(i_{t-1}, t where x_t = m_t)        its indices: of equal values the last
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnxscript import values

from linexport.trace.decompositions.named_body import NamedBody, mark

NODE = "RunningExtreme"
"""The node that stands for running maxima or minima in a graph."""

KINDS = ("float16", "float", "double", "int32", "int64")

OPSET = 20


def maximum(x: object, dim: int) -> tuple[Any, Any]:
    """Write ``aten.cummax`` as nodes of a graph."""
    return _cumulative(False, x, dim)


def minimum(x: object, dim: int) -> tuple[Any, Any]:
    """Write ``aten.cummin`` as nodes of a graph."""
    return _cumulative(True, x, dim)


def _cumulative(smallest: bool, x: Any, dim: int) -> tuple[Any, Any]:
    op, rank = values.Opset("", OPSET), len(x.shape)
    axis = dim % rank
    found = _running(x, axis, smallest)
    length = op.Squeeze(op.Shape(x, start=axis, end=axis + 1))
    places = op.Unsqueeze(op.Range(0, length, 1), [i for i in range(rank) if i != axis])
    here = op.Where(op.Equal(x, found), places, -1)
    return found, _running(here, axis, False)


def _running(x: object, axis: int, smallest: bool) -> Any:
    return mark(NODE, KINDS, x, axis=axis, smallest=int(smallest))


def write(
    tokens: str, extremes: onnx.ValueInfoProto, axis: int, smallest: int
) -> list[onnx.NodeProto]:
    """Return nodes that compute running maxima, or minima where ``smallest`` is 1, of an axis."""
    b = NamedBody(extremes.name)
    inner = NamedBody(extremes.name, b)
    type_ = extremes.type.tensor_type
    state, token = inner.fresh("state"), inner.fresh("token")
    following = (inner.Min if smallest else inner.Max)(state, token)
    made = inner.Identity(following)
    shape = [d.dim_param or d.dim_value for i, d in enumerate(type_.shape.dim) if i != axis]
    info = partial(helper.make_tensor_value_info, elem_type=type_.elem_type, shape=shape)
    body = helper.make_graph(
        inner.nodes,
        f"{extremes.name}/step",
        [info(state), info(token)],
        [info(following), info(made)],
    )
    dtype = helper.tensor_dtype_to_np_dtype(type_.elem_type)
    bounds = (-np.inf, np.inf)
    if dtype.kind != "f":
        bounds = (np.iinfo(dtype).min, np.iinfo(dtype).max)
    start = b.const(bounds[smallest], dtype)
    sizes = b.Concat(b.Shape(tokens, start=0, end=axis), b.Shape(tokens, start=axis + 1), axis=0)
    along = {"scan_input_axes": [axis], "scan_output_axes": [axis], "num_scan_inputs": 1}
    _, found = b.Scan(b.Expand(start, sizes), tokens, outputs=2, body=body, **along)
    return b.written(found)
