"""The vision tower of ``qwen3_5`` and ``qwen3_5_moe``, for one image.

    x_i = patch_i W + sum_k w_ik P[n_ik]       learned positions, a table of n x n, bilinear
    x   = blocks(x), with rotary positions (row_i, column_i)
    y   = merger(x)                            m x m patches to a token

Position of row r of h in the table: r (n - 1) / (h - 1), so that corners are aligned.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linexport.patches.library import of_file
from linexport.sources.hugging_face.vision.grid import places
from linexport.sources.loaded_model import Images, VisionTower
from linexport.system.untyped import LibraryObject


class QwenVision(nn.Module):
    """The library's modules on one image."""

    def __init__(self, visual: LibraryObject) -> None:
        super().__init__()
        self.visual = visual

    def forward(self, pixel_values: Tensor, grid: Tensor) -> Tensor:
        """image_features (tokens, width)."""
        visual = self.visual
        merge, side = visual.spatial_merge_size, visual.num_grid_per_side
        row, column = places(pixel_values.shape[0], grid[1], merge)
        x = visual.patch_embed(pixel_values)
        rows, columns = _taps(row, grid[0], side), _taps(column, grid[1], side)
        table = visual.pos_embed.weight.to(x.dtype)
        for a, weight in rows:
            for b, other in columns:
                x = x + table[a * side + b] * (weight * other).to(x.dtype)[:, None]
        turned = visual.rotary_pos_emb(x, torch.stack([row, column], -1))
        for block in visual.blocks:
            x = x + _attended(block.attn, block.norm1(x), turned)
            x = x + block.mlp(block.norm2(x))
        merged: Tensor = visual.merger(x)
        return merged


def _taps(index: Tensor, size: Tensor, side: int) -> list[tuple[Tensor, Tensor]]:
    """The two places of a table of ``side`` between which an index of ``size`` lies."""
    place = index.float() * (side - 1) / (size - 1).clamp(min=1)
    low = place.floor()
    part = place - low
    first = low.long()
    return [(first, 1 - part), ((first + 1).clamp(max=side - 1), part)]


def _attended(attention: LibraryObject, x: Tensor, turned: tuple[Tensor, Tensor]) -> Tensor:
    """Attention of all patches of one image to each other."""
    split = attention.qkv(x).reshape(x.shape[0], 3, attention.num_heads, -1)
    query, key, value = split.permute(1, 0, 2, 3).unbind(0)
    rotate = of_file(attention, "apply_rotary_pos_emb_vision")
    query, key = rotate(query, key, *turned)
    scores = query.transpose(0, 1) @ key.permute(1, 2, 0) * attention.scaling
    mixed = F.softmax(scores, -1, dtype=torch.float32).to(value.dtype) @ value.transpose(0, 1)
    result: Tensor = attention.proj(mixed.transpose(0, 1).reshape(x.shape[0], -1))
    return result


def tower(model: LibraryObject) -> VisionTower:
    """Return the tower of a model with its language model."""
    visual, config = model.model.visual, model.config
    channels = config.vision_config.in_channels * config.vision_config.temporal_patch_size
    return VisionTower(
        module=QwenVision(visual).eval(),
        image_token=config.image_token_id,
        merge=visual.spatial_merge_size,
        channels=channels * config.vision_config.patch_size**2,
        width=config.get_text_config().hidden_size,
        grid_positions=True,
        inputs=_inputs,
    )


def _inputs(ids: Tensor, image_token: int, images: Images) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.cat([pixels for pixels, _ in images]),
        "image_grid_thw": torch.stack([F.pad(grid, (1, 0), value=1) for _, grid in images]),
        "mm_token_type_ids": (ids == image_token).int(),
    }
