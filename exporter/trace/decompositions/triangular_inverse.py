"""Triangular systems, for which ONNX has no operator -> the inverse of their matrix, as a Loop.

    X_0 = 1,   X_{i+1} = X_i - X_i (N o M_i) X_i        A = D (1 + N), N strictly lower triangular

X_i is the inverse of the blocks of 2^i rows on the diagonal, and M_i is 1 where two of them meet
below it: [[A, 0], [B, C]]^-1 = [[A^-1, 0], [-C^-1 B A^-1, C^-1]]. The rounding is that of a
substitution, where that of (1 - N)(1 + N^2)(1 + N^4)... is not: powers of N may grow large before
they vanish.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper
from torch import Tensor

from linexport.system.untyped import TorchCallable
from linexport.trace.decompositions.named_body import NamedBody, mark

NODE = "TriangularInverse"
"""The node that stands for an inverse in a graph."""

library = torch.library.Library("linexport_linalg", "DEF")
library.define("triangular_inverse(Tensor matrix, bool upper, bool unit) -> Tensor")


def _inverse(matrix: Tensor, upper: bool, unit: bool) -> Tensor:
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return torch.linalg.solve_triangular(matrix, eye, upper=upper, unitriangular=unit)


library.impl("triangular_inverse", _inverse, "CompositeExplicitAutograd")
torch.library.register_fake(
    "linexport_linalg::triangular_inverse",
    lambda matrix, upper, unit: torch.empty_like(matrix),
    lib=library,
)
OPERATOR = torch.ops.linexport_linalg.triangular_inverse.default

library.define("inverse(Tensor matrix) -> Tensor")
library.impl("inverse", torch.linalg.inv, "CompositeExplicitAutograd")
torch.library.register_fake("linexport_linalg::inverse", torch.empty_like, lib=library)
UNMARKED = torch.ops.linexport_linalg.inverse.default
"""The inverse of a matrix of which ``triangles`` has to say on which side it is zero."""


def _solve_triangular(
    A: Tensor, B: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    """Stands in for ``torch.linalg.solve_triangular``."""
    inverse = OPERATOR(A, upper, unitriangular)
    return inverse @ B if left else B @ inverse


def _solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    """Stands in for ``torch.linalg.solve`` of matrices, and of a vector."""
    inverse = UNMARKED(A)
    if B.dim() == 1:
        return inverse @ B
    return inverse @ B if left else B @ inverse


SOLVERS: dict[Any, TorchCallable] = {
    torch.linalg.solve_triangular: _solve_triangular,
    torch.linalg.solve: _solve,
    **dict.fromkeys((torch.inverse, torch.linalg.inv, Tensor.inverse), UNMARKED),
}
"""Functions that solve systems, and what stands in for each in a trace."""


def symbol(matrix: object, upper: bool, unit: bool) -> Any:
    """Write an inverse as a node of a graph."""
    return mark(NODE, ("float", "double"), matrix, upper=int(upper), unit=int(unit))


def write(matrix: str, inverse: onnx.ValueInfoProto, upper: int, unit: int) -> list[onnx.NodeProto]:
    """Return nodes that compute an inverse."""
    b = NamedBody(inverse.name)
    dtype = helper.tensor_dtype_to_np_dtype(inverse.type.tensor_type.elem_type)
    lower = _transposed(b, matrix) if upper else matrix
    size = b.Shape(lower, start=-1)
    positions = b.Range(b.const(0), b.Squeeze(size), b.const(1))
    row, column = (b.Unsqueeze(positions, b.const([axis])) for axis in (1, 0))
    eye = b.Cast(b.Equal(row, column), to=helper.np_dtype_to_tensor_dtype(dtype))
    diagonal = "" if unit else b.ReduceSum(b.Mul(lower, eye), b.const([-1]), keepdims=1)
    below = b.Trilu(lower, b.const(-1), upper=0)
    rest = below if unit else b.Div(below, diagonal)
    start = b.Expand(eye, b.Shape(rest))
    several = b.Greater(b.Squeeze(size), b.const(1))
    body = _step(b, rest, row, column, size, dtype)
    found, _ = b.Loop("", several, start, b.const(1), outputs=2, body=body)
    if not unit:  # A^-1 = (1 + N)^-1 D^-1
        found = b.Div(found, _transposed(b, diagonal))
    found = _transposed(b, found) if upper else found
    return b.written(found)


def _transposed(b: NamedBody, x: str) -> str:
    """Return the matrices transposed, whatever their number of dims."""
    return str(b.Einsum(x, equation="...ij->...ji"))


def _step(
    b: NamedBody, rest: str, row: str, column: str, size: str, dtype: np.dtype[np.generic]
) -> onnx.GraphProto:
    """Return the body: from the inverse of blocks of some rows to that of twice as many."""
    inner = NamedBody(b.prefix, b)
    count, going, x, rows = (inner.fresh(n) for n in ("count", "going", "inverse", "rows"))
    block, other = inner.Div(row, rows), inner.Div(column, rows)
    one, two = inner.const(1), inner.const(2)
    odd = inner.Equal(inner.Mod(block, two), one)
    meet = inner.And(odd, inner.Equal(block, inner.Add(other, one)))
    kept = inner.Mul(rest, inner.Cast(meet, to=helper.np_dtype_to_tensor_dtype(dtype)))
    found = inner.Sub(x, inner.MatMul(inner.MatMul(x, kept), x))
    doubled = inner.Mul(rows, two)
    more = inner.Less(doubled, inner.Squeeze(size))
    kind = helper.np_dtype_to_tensor_dtype(dtype)
    given = [
        helper.make_tensor_value_info(count, onnx.TensorProto.INT64, []),
        helper.make_tensor_value_info(going, onnx.TensorProto.BOOL, []),
        helper.make_tensor_value_info(x, kind, None),
        helper.make_tensor_value_info(rows, onnx.TensorProto.INT64, []),
    ]
    made = [
        helper.make_tensor_value_info(more, onnx.TensorProto.BOOL, []),
        helper.make_tensor_value_info(found, kind, None),
        helper.make_tensor_value_info(doubled, onnx.TensorProto.INT64, []),
    ]
    return helper.make_graph(inner.nodes, f"{b.prefix}/blocks", given, made)
