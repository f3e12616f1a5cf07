"""How a target stores weights in fewer bits, and what its kernels take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import onnx

from linexport.quantization.block_quantisation import Grid
from linexport.quantization.quantisable import MIXED_BITS, TABLE_BITS, Weight
from linexport.quantization.rewrite import WithValues

Rewrite = Callable[[onnx.ModelProto, Mapping[str, WithValues]], onnx.ModelProto]
"""Puts quantised weights, by initializer, in the place of those of a graph."""

ToGrid = Callable[[Weight, int, str], Grid]
"""Gives the grid of a weight, from its bits and the type that the graph multiplies in."""


@dataclass(frozen=True)
class StorageForm:
    """How a target stores weights in fewer bits.

    Attributes:
        rewrite: puts them into a graph.
        choices: of ``--weights``.
        grid: gives the numbers that a weight may become.
        experts: what reads those of experts: ONNX Runtime's kernel where it can, a product for
            each expert, one layer of all experts, or nothing, so that they stay.
        on_cpu: it is for CPUs, where products round activations to int8: sequences are compared
            with and without that, and steps are timed.
        few_bits_looked_up: a table may have 4 bits.
    """

    rewrite: Rewrite
    choices: tuple[str, ...]
    grid: ToGrid
    experts: Literal["kernel", "products", "one layer", "none"]
    on_cpu: bool
    few_bits_looked_up: bool


def in_blocks(weight: Weight, bits: int, scales: str) -> Grid:
    """Return the blocks of MatMulNBits, without zero points for products of 4 bits.

    Without zero points ONNX Runtime's product of 4 bits is 11 % faster, and the divergence of a
    trained model 6 % larger; in 8 bits the product is as fast with them.
    """
    product_alone = not weight.is_table and weight.experts is None
    symmetric = bits == min(MIXED_BITS) and product_alone
    return Grid(bits, weight.block, symmetric, scales)


TABLE_BLOCK = 128
"""Weights of a table in 8 bits that share a scale and a zero point, 8.3 bits a weight."""


def with_large_tables(weight: Weight, bits: int, scales: str) -> Grid:
    """Return ``in_blocks``, with larger blocks of tables in 8 bits: for models in 4 bits on a CPU.

    A head that is tied to a table of many words is most of what a step reads, and in blocks of 32
    a weight has 9.25 bits. What larger blocks round off is far less than what 4 bits of the others
    do; where these have 8 bits as well, it makes the divergence 1.13 times as large.
    """
    grid = in_blocks(weight, bits, scales)
    larger = weight.is_table and bits == TABLE_BITS and weight.inputs % TABLE_BLOCK == 0
    return replace(grid, block=TABLE_BLOCK) if larger else grid
