"""Rotary positions of multimodal transformers models -> those of text alone.

    recomposition_frequencies(f), f (3, B, T, d): angles for time, height and width, interleaved

A token of text has the same position on all three axes, so that any of them is the interleaved
whole. The library interleaves by writing into slices, which a graph spells as scatters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linexport.patches import Patch, Swap


def recomposition_frequencies(self: Any, freq: Tensor) -> Tensor:
    """Stands in for the method of that name."""
    return torch.cat([freq[0], freq[0]], -1)


PATCH = Patch(
    swaps=tuple(
        Swap(
            f"{family}TextRotaryEmbedding.recomposition_frequencies",
            ("self", "freq"),
            recomposition_frequencies,
        )
        for family in ("Qwen3_5", "Qwen3_5Moe")
    ),
    families=("qwen3_5", "qwen3_5_moe"),
    tried=("transformers 5.23.0",),
)
