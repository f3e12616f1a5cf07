"""Inputs of a decoder behind a vision tower, and the positions that follow from them.

    inputs_embeds (B, T, width)     embeddings of tokens, where embeds_mask (B, T) is 1
    position_offsets (B, T, 4)      o_t, time, row and column of a token in its image, and s_t

Positions, with m_t = 1 for tokens and 0 for padding:

    a_t = m_t (1 + s_t)                     what a token adds to the positions after it
    p_t = sum_{r < t} a_r + o_t             three of them: time, row, column

s is -1 for all tokens of an image but its last, which adds as many as the longer side has. Zeros
are words: the same p_t three times, one more for each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linexport.sources.loaded_model import VisionTower
from linexport.system.untyped import LibraryObject

OFFSETS = 4
"""Numbers of a token in ``position_offsets``."""

DEFAULTS = {"inputs_embeds": 0, "embeds_mask": 0, "position_offsets": 0}
"""Values of inputs without an image."""

RANGES = {3: (0, 2), 4: (0, 3)}
"""Integers to draw for these inputs in checks, by the place of the input."""


def absent(input_ids: Tensor, vision: VisionTower) -> tuple[Tensor, ...]:
    """Return these inputs for tokens without images."""
    zeros = torch.zeros(*input_ids.shape, vision.width), torch.zeros_like(input_ids)
    if not vision.grid_positions:
        return zeros
    return (*zeros, input_ids.new_zeros(*input_ids.shape, OFFSETS))


def embeddings(
    model: LibraryObject, input_ids: Tensor, inputs_embeds: Tensor, mask: Tensor
) -> Tensor:
    """Return the embeddings of tokens, with those given where the mask is 1."""
    own = model.get_input_embeddings()(input_ids)
    return torch.where(mask.bool()[..., None], inputs_embeds, own)


def advances(attention_mask: Tensor, offsets: Tensor) -> Tensor:
    """Return a, (B, T)."""
    return attention_mask * (1 + offsets[..., OFFSETS - 1])


def grid_positions(steps: Tensor, offsets: Tensor, before: Tensor) -> Tensor:
    """Return p, (3, B, T).

    Args:
        steps: a, (B, T).
        offsets: see above.
        before: sum over the tokens of earlier calls, (B, 1).
    """
    start = before + steps.cumsum(-1) - steps
    return (start[..., None] + offsets[..., : OFFSETS - 1]).movedim(-1, 0)
