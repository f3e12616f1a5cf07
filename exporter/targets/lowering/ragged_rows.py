"""Sequences side by side, put into rows of one length and back, in standard ONNX operators.

    x (n, ...), cu_seqlens (B + 1)  --padded-->  (B, T, ...)  --joined-->  (n, ...)

Sequence i is tokens cu_seqlens[i] ... cu_seqlens[i + 1] - 1, T the longest, and zeros follow the
shorter ones. Every sequence has a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from linexport.plugins.ops.body import Body


@dataclass(frozen=True)
class SequenceRows:
    """Where the tokens of each row are.

    Attributes:
        b: where to write.
        lengths: (B,) int64.
        index: (B, T) int64, of the token in each place; any in those that are padding.
        filled: (B, T) bool, the places of tokens.
    """

    b: Body
    lengths: str
    index: str
    filled: str

    @classmethod
    def of(cls, b: Body, ends: str, tokens: str) -> SequenceRows:
        """Write where the tokens of ``tokens`` (n, ...) go, ``ends`` being cu_seqlens."""
        ends, axis = b.Cast(ends, to=TensorProto.INT64), b.const([0])
        starts = b.Slice(ends, axis, b.const([-1]))
        after = b.Slice(ends, b.const([1]), b.const([np.iinfo(np.int64).max]))
        lengths = b.Sub(after, starts)
        place = b.Range(b.const(0), b.ReduceMax(lengths, keepdims=0), b.const(1))
        column = b.const([1])
        index = b.Add(b.Unsqueeze(starts, column), place)
        last = b.Sub(b.Shape(tokens, start=0, end=1), column)
        filled = b.Less(place, b.Unsqueeze(lengths, column))
        return cls(b, lengths, b.Min(index, last), filled)

    def padded(self, tokens: str) -> str:
        """Write (n, ...) as (B, T, ...)."""
        b = self.b
        taken = b.Gather(tokens, self.index, axis=0)
        ones = b.Expand(b.const([1]), b.Sub(b.Shape(b.Shape(tokens)), b.const([1])))
        shape = b.Concat(b.Shape(self.filled), ones, axis=0)
        return str(b.Where(b.Reshape(self.filled, shape), taken, b.CastLike(b.const(0.0), taken)))

    def joined(self, rows: str) -> str:
        """Write (B, T, ...) as (n, ...)."""
        b = self.b
        shape = b.Concat(b.const([-1]), b.Shape(rows, start=2), axis=0)
        filled = b.Reshape(self.filled, b.const([-1]))
        return str(b.Compress(b.Reshape(rows, shape), filled, axis=0))
