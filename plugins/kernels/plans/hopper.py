"""Tiles of compute capability 9.0: the fastest on an H100 of those that do not spill.

Measured by ``tools/gpu_tiles.py`` (``docs/data/gpu_tiles``). Blocks of four warps, two a
multiprocessor, are about twice as fast as one of eight with the same columns. What spills is not
taken however fast it is: as compiled by Triton 3.7.1, some kernels whose operands of wgmma were
spilled read outside of their shared memory there, and one was wrong.
"""

from __future__ import annotations

from linexport.plugins.kernels.plans.tile import Shape, Tile, power


def output(shape: Shape) -> Tile | None:
    """Tile of ``segment_output``; None where the general one is taken."""
    if not shape.on_hopper:
        return None
    if shape.type == "fp32":
        return _of_floats(shape)
    block_k, block_v = shape.block_k, power(shape.d_v)
    if shape.pairs:
        return Tile(_chunk(shape), 64, min(block_v, 16), 4, 1) if block_k > 64 else None
    if block_k > 128:
        if shape.normalize and shape.type == "fp16":  # with four warps all tiles spill
            return Tile(16, block_k, 16, 8, 1)
        return Tile(16, block_k, min(block_v, 32), 4, 1 if shape.normalize else 2)
    if block_k <= 64:
        return None
    if not shape.normalize:
        return Tile(_chunk(shape), block_k, min(block_v, 64), 4, 2)
    if not shape.whole:
        return None
    if shape.type == "fp16":
        return Tile(16, block_k, 64, 4, 2)
    if shape.decays or shape.grouped:
        chunk = 16 if shape.decays and shape.grouped else _chunk(shape)
        return Tile(chunk, block_k, 64, 4, 1)
    return Tile(32, block_k, min(block_v, 128), 8, 2 if shape.causal else 1)


def _chunk(shape: Shape) -> int:
    """Tokens of a chunk: longer ones spill, but for the plainest rule."""
    if shape.delta or shape.decays > 1 or (shape.decays and not shape.whole):
        return 16
    if shape.type == "fp16":
        return 32
    plain = shape.map == "identity" and not (shape.decays or shape.grouped)
    return 64 if plain and shape.whole else 32


def _of_floats(shape: Shape) -> Tile | None:
    """Operands are kept twice there, and blocks of eight warps have the registers for it."""
    block_k, block_v = shape.block_k, min(power(shape.d_v), 32)
    if shape.pairs:
        return None
    if shape.grouped and shape.normalize:
        return Tile(16, 32, block_v, 8, 1) if block_k > 64 else None
    if shape.delta and shape.decays <= 1 and block_k > 64:
        return Tile(16, 32, block_v, 8, 1)
    lean = shape.decays > 1 or (shape.map in ("elu1", "exp") and not shape.decays)
    if lean and not (shape.decays and shape.normalize) and block_k <= 128:
        return Tile(16, block_k, block_v, 8, 1)
    return Tile(16, min(block_k, 64), block_v, 8, 1)
