"""Tiles of the LinearAttention kernels, and the sizes that their choice depends on."""

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
        causal: a token is attended to by those behind it alone.
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
    causal: bool

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
    def on_hopper(self) -> bool:
        """Compute capability 9.0, whose tiles were chosen by their times: see ``hopper``."""
        return self.sm == 90

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


def power(width: int) -> int:
    """The least power of two that holds ``width``, at least 16: what tensor cores take."""
    return max(16, 1 << (width - 1).bit_length())
