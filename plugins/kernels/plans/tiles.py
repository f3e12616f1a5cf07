"""Tiles of the LinearAttention kernels: what compiles without spills for the usual head widths.

A block of ``linear.segment_output`` holds d_k rows and ``block_v`` columns of a state in registers,
with a chunk of queries, keys and scores; or ``block_k`` rows at a time, where that is fewer.
``tools/gate_kernels.py`` assembles every tile named here and counts its spills and tensor-core
instructions.
"""

from __future__ import annotations

from linexport.plugins.kernels.plans import hopper
from linexport.plugins.kernels.plans.tile import Shape, Tile, power

SCAN_BLOCK = 1024
SCAN = Tile(1, 1, 1, 4, 1)


def output(shape: Shape) -> Tile:
    """Tile of ``segment_output``, which goes through ``parts`` of d_k where it holds fewer columns.

    There nothing may be loaded ahead of the loop's turn, since the state is in memory: one stage.
    On 8.7 and 8.9 the gated delta rule of float16 spills in loads that are not pipelined.
    Normalised queries of several heads with decays spill in parts of 32 columns and not in 16, and
    on 10.0 in chunks of 32 tokens and not in 16.
    """
    measured = hopper.output(shape)
    if measured:
        return measured
    block_k, block_v = shape.block_k, power(shape.d_v)
    crowded = shape.grouped and shape.normalize and shape.decays
    if shape.type == "fp32" or block_k > 128:
        part = 16 if shape.type == "fp32" and crowded else 32
        return Tile(16, min(block_k, part), min(block_v, 16), 8, 1)
    wide_products = shape.type == "fp16"  # with states and scores, in TensorFloat-32
    short = shape.decays > 1 or wide_products or (crowded and shape.sm == 100)
    chunk = 16 if short else 32
    if shape.pairs and block_k > 64:
        return Tile(chunk, 64, min(block_v, 32), 8, 1)
    if shape.from_shared:
        return Tile(chunk, block_k, min(block_v, 64), 4 if block_k <= 64 else 8, 2)
    if block_k <= 64:
        return Tile(16 if shape.pairs else chunk, block_k, min(block_v, 32), 4, 2)
    if shape.delta:
        ahead = shape.sm in (87, 89) and shape.type == "fp16" and shape.decays == 1
        return Tile(16, block_k, min(block_v, 16), 4, 2 if ahead else 1)
    return Tile(16, block_k, min(block_v, 16 if wide_products else 32), 8, 2)


def state(shape: Shape) -> Tile:
    """Tile of ``segments.segment_state``, with the chunk of ``output``: segments are whole chunks.

    On 10.0 tiles of halves spill in some kernels where they are square (10.3 and 11.0 have its
    tiles), and on 12.0 and 12.1 the plainest one of float16. On 8.7 and 8.9 two stages spill in
    some, and three do not.
    """
    single = shape.type == "fp32"
    if shape.on_hopper and not single and not shape.pairs:
        stages = 3 if shape.decays or shape.map == "identity" else 1  # wgmma would be serialised
        block_v = min(power(shape.d_v), 128)
        return Tile(output(shape).chunk, min(shape.block_k, 64), block_v, 4, stages)
    plainest = shape.type == "fp16" and not (shape.normalize or shape.decays)
    low = single or (plainest and shape.sm // 10 == 12)
    block_k = min(shape.block_k, 32 if low else 64)
    narrow = shape.sm // 10 in (10, 11) or (shape.sm // 10 == 8 and shape.normalize)
    block_v = min(power(shape.d_v), 32 if narrow and not single else 64)
    decayed_sums = shape.normalize and shape.decays == 1
    deep = shape.sm in (87, 89) and not single and (shape.pairs or decayed_sums)
    stages = 1 if shape.on_hopper and not shape.decays else 3 if deep else 2
    return Tile(output(shape).chunk, block_k, block_v, 4, stages)


def scores(shape: Shape) -> Tile:
    """Tile of ``channels.chunk_scores``: one warp, since several would make the same products."""
    return Tile(output(shape).chunk, 16, 1, 1, 1)


def inverse(shape: Shape) -> Tile:
    """Tile of ``delta.chunk_inverse``, with the chunk of ``output``.

    Keys are in parts where more of them spill.
    """
    chunk, block_k = output(shape).chunk, shape.block_k
    if shape.decays > 1:
        block_k = min(block_k, 32)
    elif shape.single and block_k > 128:
        block_k = 64
    alone = shape.on_hopper and shape.type != "fp32" and chunk == 16
    return Tile(chunk, block_k, 1, 1 if alone else chunk // 8, 1)


def transition(shape: Shape) -> Tile:
    """Tile of ``transitions.segment_transition``: all of d_k, with the chunk of ``output``."""
    warps = 8 if shape.single and shape.block_k > 64 else 4
    if shape.single or shape.block_k > 128:
        return Tile(output(shape).chunk, shape.block_k, 16, warps, 1)
    columns = 64 if shape.on_hopper and shape.decays <= 1 else 32
    return Tile(output(shape).chunk, shape.block_k, columns, warps, 2)


def transition_scan(shape: Shape) -> Tile:
    """Tile of ``transitions.transition_scan``: narrow, since a head has few blocks."""
    return Tile(1, min(shape.block_k, 64), 16, 4, 1)


def step(shape: Shape) -> Tile:
    """Tile of ``recurrent.step``: small, since a decode step is bound by loads in flight."""
    block_v = min(power(shape.d_v), max(2048 // shape.block_k, 8))
    grouped_sums = shape.grouped and shape.normalize and shape.type == "fp32"
    if shape.delta or grouped_sums:
        block_v = min(block_v, 8 if grouped_sums and shape.sm // 10 == 12 else 16)  # 16 spill there
    return Tile(1, shape.block_k, block_v, 4, 1)
