"""StabilizedExp in standard operators.

m_t = max(m_{t-1} + g_t, k_t),   exp(k_t - m_t),   decay  m_{t-1} + g_t - m_t
"""

from __future__ import annotations

import numpy as np

from linexport.plugins.ops.body import Body
from linexport.plugins.ops.op import (
    Node,
    reads_causal,
)
from linexport.plugins.ops.recurrence import Recurrence, Semiring
from linexport.plugins.ops.stabilized_exp.definition import LOWEST, width_of

MAXIMA = Semiring("Add", "Max", 0.0, LOWEST)


def portable(node: Node) -> tuple[Body, list[str]]:
    """The running maximum is a recurrence whose sum is the larger one, see ``recurrence``."""
    b = Body()
    features = width_of(node)
    query_heads, heads = (int(node.attributes[n]) for n in ("q_num_heads", "k_num_heads"))
    query, key, past, mask, decay = node.inputs
    width = heads * features
    if mask:
        keep = b.Unsqueeze(mask, b.const([2]))
        key = b.Where(keep, key, b.const(LOWEST))
        decay = decay and b.Where(keep, decay, b.const(0.0))
    if decay and node.shapes["decay"][-1] != width:
        decay = b.Gather(decay, b.const(np.repeat(np.arange(heads), features)), axis=2)
    if reads_causal(node.attributes):
        batch = b.Shape(key, start=0, end=1)
        start = b.Expand(b.const(LOWEST), b.Concat(batch, b.const([width]), axis=0))
        if past:
            start = b.Reshape(past, b.const([0, width]))
        last, maximum, decay = _running(b, start, key, decay, width)
    else:
        lowest = b.Expand(b.const(LOWEST), b.Concat(*_row(b, key, width), axis=0))
        maximum = b.ReduceMax(b.Concat(lowest, key, axis=1), b.const([1]), keepdims=1)
        last, decay = b.Squeeze(maximum, b.const([1])), b.Mul(key, b.const(0.0))
    key_features = b.Exp(b.Sub(key, maximum))
    served = max(query_heads, heads)
    split = b.Reshape(query, b.const([0, 0, query_heads, features]))
    if query_heads != served:
        index = b.const(np.repeat(np.arange(query_heads), served // query_heads))
        split = b.Gather(split, index, axis=2)
    grouped = b.Reshape(split, b.const([0, 0, heads, served // heads, features]))
    exponent = b.Add(grouped, b.Reshape(maximum, b.const([0, 0, heads, 1, features])))
    exponent = b.Sub(exponent, b.ReduceMax(exponent, b.const([-1]), keepdims=1))
    query_features = b.Reshape(b.Exp(exponent), b.const([0, 0, served * features]))
    present = b.Reshape(last, b.const([0, heads, features]))
    return b, [query_features, key_features, decay, present]


def _row(b: Body, key: str, width: int) -> tuple[str, str, str]:
    """The shape (B, 1, width)."""
    return b.Shape(key, start=0, end=1), b.const([1]), b.const([width])


def _running(b: Body, start: str, key: str, decay: str, width: int) -> tuple[str, str, str]:
    """Last maximum (B, H*M), all of them and the decays (B, T, H*M)."""
    maximum, last = Recurrence(MAXIMA, decay, width).write(b, [key], [start])
    axis = b.const([1])
    shifted = b.Concat(b.Unsqueeze(start, axis), maximum, axis=1)
    before = b.Slice(shifted, b.const([0]), b.Shape(key, start=1, end=2), axis)
    return last, maximum, b.Sub(b.Add(before, decay) if decay else before, maximum)
