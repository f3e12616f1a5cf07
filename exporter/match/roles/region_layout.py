"""Dims of the tensors of a stateful region: batch, tokens, heads and width.

(B, T, H, D), (B, H, T, D), (B, T, H * D), ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from linexport.graph.monomials import ONE, Size, product
from linexport.match.forms.axes import Axis, Index
from linexport.match.forms.evaluate import Evaluator


@dataclass(frozen=True)
class TokenLayout:
    """Dims of a tensor.

    Attributes:
        dims: every size.
        tokens: the place of the tokens.
        rest: all other sizes above 1, in order.
        merged: how many of the last of these are one dim.
    """

    dims: tuple[Size, ...]
    tokens: int
    rest: tuple[Size, ...]
    merged: int = 1

    def index(self, tokens: Axis, rest: Sequence[Index]) -> tuple[Index, ...]:
        """Return labels for every dim."""
        single = len(rest) - self.merged
        together = tuple(a for index in rest[single:] for a in index)
        left = iter([*rest[:single], together])
        return tuple(
            (tokens,) if i == self.tokens else () if size == ONE else next(left)
            for i, size in enumerate(self.dims)
        )

    def packed(self, x: np.ndarray, batch: int) -> np.ndarray:
        """Return values as (B, T, heads * width); the batch has so many dims."""
        others = [n for i, n in enumerate(x.shape) if i != self.tokens and self.dims[i] != ONE]
        x = np.moveaxis(x, self.tokens, 0).reshape(-1, *others)
        x = np.moveaxis(x, 0, batch)
        return x.reshape(math.prod(others[:batch]), x.shape[batch], -1).astype(np.float64)

    def split(self, shape: Sequence[Size]) -> TokenLayout:
        """Return the layout with heads and a width in the place of the last dim.

        Args:
            shape: of the same values, which may end with these.
        """
        *rest, last = self.rest
        ends = tuple(shape[-2:])
        if ONE in ends or self.dims[-1] != last or product(list(ends)) != last:
            return self
        return replace(self, rest=(*rest, *ends), merged=2)


def layout_of(
    evaluator: Evaluator, tensor: gs.Tensor, tokens: Size, place: int | None = None
) -> TokenLayout | None:
    """Return the layout of a tensor of floats; None where it has no dim of tokens.

    Args:
        evaluator: of the graph.
        tensor: whose dims are known.
        tokens: the size of their dim.
        place: of this dim, where it is known.
    """
    sizes = evaluator.sizes(tensor)
    if sizes is None or str(tensor.dtype) not in ("float32", "float16"):
        return None
    if place is None and tokens not in sizes:
        return None
    place = sizes.index(tokens) if place is None else place
    rest = tuple(s for i, s in enumerate(sizes) if i != place and s != ONE)
    return TokenLayout(tuple(sizes), place, rest)
