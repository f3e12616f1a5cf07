"""Inverses of triangular matrices in standard operators."""

from __future__ import annotations

from onnx import TensorProto

from linexport.plugins.ops.body import Body


def unit_lower_inverse(b: Body, below: str, index: str, largest: int) -> str:
    """(I + A)^-1 for strictly lower triangular A, by doubling the size of inverted blocks.

    With X the inverse of the diagonal blocks of size w and A_w the part of A that joins two of
    them, X - X A_w X inverts the blocks of size 2w. Close to forward substitution in accuracy,
    unlike a series in powers of A, whose entries grow like binomials.

    Args:
        b: the body to append to.
        below: A, of any number of matrices.
        index: of its rows, 0, 1, ...
        largest: rows that A has at most.
    """
    row, column = b.Unsqueeze(index, b.const([1])), b.Unsqueeze(index, b.const([0]))
    inverse = b.Cast(b.Equal(row, column), to=TensorProto.FLOAT)
    width = 1
    while width < largest:
        pair, w = b.const(2 * width), b.const(width)
        same = b.Equal(b.Div(row, pair), b.Div(column, pair))
        joins = b.And(same, b.Not(b.Equal(b.Div(row, w), b.Div(column, w))))
        joined = b.Where(joins, below, b.const(0.0))
        # Blocks of one row are inverted by the identity.
        within = joined if width == 1 else b.MatMul(b.MatMul(inverse, joined), inverse)
        inverse = b.Sub(inverse, within)
        width *= 2
    return str(inverse)
