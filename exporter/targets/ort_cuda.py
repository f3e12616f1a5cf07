"""Target ``ort-cuda``: ONNX Runtime's CUDA provider: its kernels, without loops over blocks.

GatedDeltaNet is the faster operator: threads share a state by its value channels, where keys are
64, 128 or 256 wide, to which heads are padded. On an H200 8,192 tokens of 16 heads of 64 x 65 took
4.6 ms, 8 heads of 32 x 33, as they are, 14.6 ms, and LinearAttention 28.7 and 17.7 ms. It has no
more heads of queries than of values. For others, and for values of width one, there is
LinearAttention, whose rules are read in its source: a block of threads keeps the state of a head in
shared memory, and goes from token to token,

    4 (d_k d_v + d_k + max(d_k, d_v))  <=  shared memory of a block      max(d_k, d_v) <= 1024

and for d_k = 64 and 128 with d_v a multiple of 32 it divides a state among several blocks, where
the heads are too few to fill the GPU: those widths are padded to. Inputs of both have to have a
token, and both are called in float32: LinearAttention's state has the type of the activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from linexport.plugins.ops import causal_conv, linear_attention
from linexport.plugins.ops.linear_attention import SCALE, multiplied_out, view
from linexport.plugins.ops.op import Node
from linexport.targets import diagonal, kernels, native_kernel
from linexport.targets.base import OrtSession, Target
from linexport.targets.lowering import Candidate, by_rules

KEYS = (64, 128, 256)
"""Widths of keys for which GatedDeltaNet divides a state among threads."""

SHARED = 99 * 1024
"""Bytes of shared memory that a block may have on any GPU of compute capability 8.0 and later."""

WIDEST = 1024
"""Threads of a block, one for each row or column of a state."""

DIVIDED_KEYS, DIVIDED_VALUES = (64, 128), 32
"""Widths of keys, and multiple of widths of values, for which states are divided among blocks."""


def _conv(node: Node) -> Sequence[Candidate]:
    return [
        Candidate("native", "ONNX Runtime's kernel", kernels.native_conv),
        Candidate("portable", "standard operators", causal_conv.OP.portable),
    ]


def _attention(node: Node) -> Sequence[Candidate]:
    portable = linear_attention.OP.portable
    spec, sizes = view(node)
    if not spec.causal:
        return [Candidate("portable", "bidirectional: two matrix products", portable)]
    by_element = SCALE in node.shapes or diagonal.fits(node)
    if not by_element and spec.q_num_heads <= spec.kv_num_heads and sizes.d_k <= max(KEYS):
        return [_gated_delta_net(node)]
    if not takes(sizes.d_k, sizes.d_v + spec.normalize):
        reason = f"states of {sizes.d_k} x {sizes.d_v} are too large for the kernel: a Scan"
        return [Candidate("portable", reason, portable)]
    if by_element:
        write = multiplied_out(partial(kernels.native_columns, d_k=sizes.d_k))
        return [Candidate("native", "ONNX Runtime's kernel, a block for each head", write)]
    return [_divided(node) or _whole(node)]


def _gated_delta_net(node: Node) -> Candidate:
    spec, sizes = view(node)
    d_k = next(width for width in KEYS if sizes.d_k <= width)
    shares = spec.q_num_heads == sizes.key_heads
    dialect = replace(native_kernel.GATED_DELTA_NET, shares_keys=shares)
    write = partial(kernels.native_columns, d_k=d_k, dialect=dialect)
    padded = "" if d_k == sizes.d_k else f", keys padded to {d_k}"
    return Candidate("gated_delta_net", f"ONNX Runtime's GatedDeltaNet{padded}", write)


def takes(d_k: int, d_v: int) -> bool:
    """Return whether LinearAttention's kernel runs states of these widths on every GPU."""
    longer = max(d_k, d_v)
    return 4 * (d_k * d_v + d_k + longer) <= SHARED and longer <= WIDEST


def _whole(node: Node) -> Candidate:
    write = partial(kernels.native_columns, d_k=view(node)[1].d_k)
    return Candidate("native", "ONNX Runtime's kernel, a block for each head", write)


def _divided(node: Node) -> Candidate | None:
    """The kernel on heads of widths whose states it divides; None where that wastes much."""
    sizes = view(node)[1]
    d_k = next((width for width in DIVIDED_KEYS if sizes.d_k <= width), None)
    if d_k is None or 2 * sizes.d_k < d_k or 2 * sizes.d_v < DIVIDED_VALUES:
        return None
    if not takes(d_k, sizes.d_v + DIVIDED_VALUES):
        return None
    padded = sizes.d_k != d_k or sizes.d_v % DIVIDED_VALUES
    reason = (
        f"heads padded to {d_k} keys and multiples of {DIVIDED_VALUES} values, whose states the "
        "kernel divides among blocks"
        if padded
        else "widths whose states the kernel divides among blocks"
    )
    write = partial(kernels.native_columns, d_k=d_k, multiple=DIVIDED_VALUES)
    return Candidate("native_padded" if padded else "native", reason, write)


TARGET = Target(
    name="ort-cuda",
    candidates=by_rules({causal_conv.OP: _conv, linear_attention.OP: _attention}),
    open=OrtSession,
)
