"""Tile sizes of the LinearAttention kernels: what compiles without spills for each head width.

A block of ``linear.segment_output`` holds d_k rows and ``block_v`` columns of a state in registers,
beside a chunk of queries, keys and scores; one of ``parts.segment_output`` holds ``block_k`` rows.
``tools/gate_kernels.py`` assembles every tile named here and counts its spills and tensor-core
instructions.
"""

from __future__ import annotations

from dataclasses import dataclass

from linexport.plugins.kernels.plans import fused_maps

REGISTER_WARPS = 8
"""Warps of 255 registers a thread that a multiprocessor has registers for, 65,536."""


@dataclass(frozen=True)
class Tile:
    """Tokens of a chunk, columns of keys and values a block holds, warps, pipeline stages."""

    chunk: int
    block_k: int
    block_v: int
    warps: int
    stages: int

    @property
    def resident(self) -> int:
        """Blocks that the registers of a multiprocessor hold, however many a thread takes."""
        return max(REGISTER_WARPS // self.warps, 1)


@dataclass(frozen=True)
class Shape:
    """Sizes that the choice of a tile depends on.

    Attributes:
        decays: of a token of a head: 0, 1 or d_k.
        delta: the rule is one of the delta rules.
        map: from queries and keys to features.
        normalize: outputs are divided by sums of scores.
        grouped: several query heads share a state.
        precision: of products in float32; see ``plugins.kernels.plan``.
    """

    d_k: int
    d_v: int
    type: str
    sm: int
    decays: int
    delta: bool
    map: str
    normalize: bool
    grouped: bool
    precision: str

    @property
    def block_k(self) -> int:
        """d_k in full: scores and outputs are sums over it."""
        return power(self.d_k)

    @property
    def from_shared(self) -> bool:
        """Tensor cores read operands from shared memory, not from registers."""
        return self.sm in (90, 100)

    @property
    def whole(self) -> bool:
        """Tiles of 64 columns of values hold nothing but a state: no columns are masked."""
        return self.d_k == self.block_k and self.d_v % 64 == 0

    @property
    def pairs(self) -> bool:
        """The map multiplies components: its features are float32 whatever the type."""
        return self.map in fused_maps.PAIRS

    @property
    def measured(self) -> bool:
        """Tiles were chosen by their times, on an H100: by ``tools/gpu_tiles.py``."""
        return self.sm == 90 and self.type != "fp32"

    @property
    def single(self) -> bool:
        """Features are in float32: products are made of three, and keep operands twice."""
        return self.type == "fp32" or self.pairs

    @property
    def segmented(self) -> bool:
        """Return whether sequences can be cut: a delta rule needs all of d_k in a block for it.

        In float32 keys wider than 128 spill whatever the tile, and than 64 with decays per channel.
        """
        if not (self.delta and self.single):
            return True
        return self.block_k <= (64 if self.decays > 1 else 128)

    @property
    def one_product(self) -> bool:
        """A product in float32 is one in TensorFloat-32: operands are not kept twice."""
        return self.type == "fp32" and self.precision == "tf32"


SCAN_BLOCK = 1024
SCAN = Tile(1, 1, 1, 4, 1)


def output(shape: Shape) -> Tile:
    """Tile of ``segment_output``: that of ``parts`` where it holds fewer than d_k columns of keys.

    There nothing may be loaded ahead of the loop's turn, since the state is in memory: one stage.
    With operands kept once, parts of 32 columns spill in some kernels, and parts of 64 do not.
    """
    block_k, block_v = shape.block_k, power(shape.d_v)
    if shape.measured and block_k > 128 and not shape.pairs:
        return Tile(16, block_k, min(block_v, 32), 4, 2)
    if shape.type == "fp32" or block_k > 128:
        return Tile(16, min(block_k, 64 if shape.one_product else 32), min(block_v, 16), 8, 1)
    wide_products = shape.type == "fp16"  # with states and scores, in TensorFloat-32
    chunk = 16 if shape.decays > 1 or wide_products else 32
    if shape.pairs and block_k > 64:
        return Tile(chunk, 64, min(block_v, 32), 8, 1)
    if shape.measured and block_k > 64:
        if shape.map == "favor+":  # its projection takes registers, which eight warps have
            return Tile(chunk, block_k, min(block_v, 64), 8, 1)
        if not shape.normalize:
            return Tile(_chunk(shape), block_k, min(block_v, 64), 4, 2)
        if shape.whole:
            return Tile(_chunk(shape), block_k, 32 if wide_products else 64, 4, 1)
    if shape.from_shared:
        single = shape.decays == 1 if shape.sm == 100 else shape.normalize
        stages = 1 if single and block_k > 64 else 2
        return Tile(chunk, block_k, min(block_v, 64), 4 if block_k <= 64 else 8, stages)
    if block_k <= 64:
        return Tile(16 if shape.pairs else chunk, block_k, min(block_v, 32), 4, 2)
    if shape.delta:
        return Tile(16, block_k, min(block_v, 16), 4, 1)
    return Tile(16, block_k, min(block_v, 16 if wide_products else 32), 8, 2)


def _chunk(shape: Shape) -> int:
    """Tokens of a chunk of two blocks of four warps a multiprocessor, which nothing else equalled.

    Longer ones spill, but for the plainest rule; and a kernel whose operands of wgmma are spilled
    reads outside its shared memory or is wrong, on an H100 as compiled by Triton 3.7.1.
    """
    sums = bool(shape.decays) + shape.normalize
    if shape.delta or shape.decays > 1 or shape.type == "fp16" or sums + shape.grouped == 2:
        return 16
    return 64 if shape.whole and shape.map == "identity" and not sums + shape.grouped else 32


def state(shape: Shape) -> Tile:
    """Tile of ``segments.segment_state``, with the chunk of ``output``: segments are whole chunks.

    On 10.0 tiles of halves spill in some kernels where they are square (10.3 and
    11.0 have its tiles), and on 8.7 and 8.9 those of one product in float32 where loads are
    pipelined.
    """
    single = shape.type == "fp32"
    if shape.measured and not shape.pairs:
        stages = 3 if shape.decays or shape.map == "identity" else 1  # wgmma would be serialised
        block_v = min(power(shape.d_v), 128)
        return Tile(output(shape).chunk, min(shape.block_k, 64), block_v, 4, stages)
    block_k = min(shape.block_k, 32 if single else 64)
    block_v = min(power(shape.d_v), 32 if shape.sm // 10 in (10, 11) and not single else 64)
    stages = 1 if shape.one_product or (shape.sm == 90 and not shape.decays) else 2
    return Tile(output(shape).chunk, block_k, block_v, 4, stages)


def scores(shape: Shape) -> Tile:
    """Tile of ``channels.chunk_scores``: one warp, since several would make the same products."""
    return Tile(output(shape).chunk, 16, 1, 1, 1)


def inverse(shape: Shape) -> Tile:
    """Tile of ``delta.chunk_inverse``, with the chunk of ``output``."""
    chunk = output(shape).chunk
    block_k = min(shape.block_k, 32) if shape.decays > 1 else shape.block_k
    return Tile(chunk, block_k, 1, 1 if shape.measured and chunk == 16 else chunk // 8, 1)


def transition(shape: Shape) -> Tile:
    """Tile of ``transitions.segment_transition``: all of d_k, with the chunk of ``output``."""
    warps = 8 if shape.single and shape.block_k > 64 else 4
    if shape.single or shape.block_k > 128:
        return Tile(output(shape).chunk, shape.block_k, 16, warps, 1)
    stages = 1 if shape.type == "fp16" and shape.decays > 1 else 2
    columns = 64 if shape.measured and shape.decays <= 1 else 32
    return Tile(output(shape).chunk, shape.block_k, columns, warps, stages)


def transition_scan(shape: Shape) -> Tile:
    """Tile of ``transitions.transition_scan``: narrow, since a head has few blocks."""
    return Tile(1, min(shape.block_k, 64), 16, 4, 1)


def step(shape: Shape) -> Tile:
    """Tile of ``recurrent.step``: small, since a decode step is bound by loads in flight."""
    block_v = min(power(shape.d_v), max(2048 // shape.block_k, 8))
    if shape.delta:
        block_v = min(block_v, 16)
    return Tile(1, shape.block_k, block_v, 4, 1)


def power(width: int) -> int:
    """The least power of two that holds ``width``, at least 16: what tensor cores take."""
    return max(16, 1 << (width - 1).bit_length())
