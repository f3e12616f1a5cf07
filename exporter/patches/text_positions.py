"""Rotary positions of multimodal transformers models, of text alone and with images.

    recomposition_frequencies(f), f (3, B, T, d): angles for time, height and width, interleaved

    channel j    j mod 3 = 1 and j < 3 s_1: height;  j mod 3 = 2 and j < 3 s_2: width;  else time

A token of text has the same position on all three axes, so that any of them is the interleaved
whole: that is taken unless a model is marked as one of images. The library interleaves by writing
into slices, which a graph spells as scatters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linexport.patches import Patch, Swap
from linexport.system.untyped import LibraryObject

MARK = "linexport_of_images"
"""Attribute of a rotary embedding whose positions may differ between the axes."""


def recomposition_frequencies(self: LibraryObject, freq: Tensor) -> Tensor:
    """Stands in for the method of that name."""
    if not getattr(self, MARK, False):
        return torch.cat([freq[0], freq[0]], -1)
    channel = torch.arange(freq.shape[-1])
    mixed = freq[0]
    for axis in (1, 2):
        of_axis = (channel % 3 == axis) & (channel < 3 * self.mrope_section[axis])
        mixed = torch.where(of_axis, freq[axis], mixed)
    return torch.cat([mixed, mixed], -1)


def mark(model: torch.nn.Module) -> None:
    """Mark a model as one whose tokens have different positions on the three axes."""
    for part in model.modules():
        if hasattr(part, "mrope_section"):
            setattr(part, MARK, True)


PATCH = Patch(
    swaps=tuple(
        Swap(f"{family}TextRotaryEmbedding.recomposition_frequencies", recomposition_frequencies)
        for family in ("Qwen3_5", "Qwen3_5Moe")
    ),
    families=("qwen3_5", "qwen3_5_moe"),
)
