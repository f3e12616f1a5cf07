"""The vision tower of ``lfm2_vl``, SigLIP 2 and a projector, for one image.

    x_i = patch_i W + sum_ab r_ia c_ib P[a, b]       learned positions, n x n, with antialiasing
    y   = projector(norm(encoder(x)))                m x m patches to a token, row by row

Row r of h, from a table of n rows, with s = max(n / h, 1):

    r_a = k_a / sum_a k_a,    k_a = max(0, 1 - |a + 1/2 - (r + 1/2) n / h| / s)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from linexport.sources.hugging_face.vision.grid import places
from linexport.sources.loaded_model import Images, VisionTower
from linexport.system.untyped import LibraryObject


class SiglipVision(nn.Module):
    """The library's modules on one image."""

    def __init__(self, model: LibraryObject) -> None:
        super().__init__()
        self.vision, self.projector = model.vision_tower, model.multi_modal_projector

    def forward(self, pixel_values: Tensor, grid: Tensor) -> Tensor:
        """image_features (tokens, width)."""
        embeddings, count = self.vision.embeddings, pixel_values.shape[0]
        side = embeddings.position_embedding_size
        row, column = places(count, grid[1])
        taps = _taps(row, grid[0], side)[:, :, None] * _taps(column, grid[1], side)[:, None]
        table = embeddings.position_embedding.weight
        x = embeddings.patch_embedding(pixel_values)
        x = x + taps.reshape(count, side * side).to(x.dtype) @ table
        x = self.vision.encoder(inputs_embeds=x[None]).last_hidden_state
        return self._projected(self.vision.post_layernorm(x)[0], grid[1])

    def _projected(self, x: Tensor, width: Tensor) -> Tensor:
        """Tokens of m x m patches, whose values stand one after another."""
        projector, merge = self.projector, self.projector.factor
        # The order of blocks, as places in the order of rows.
        row, column = places(x.shape[0], width, merge)
        x = x[row * width + column].reshape(-1, merge**2 * x.shape[-1])
        if projector.use_layer_norm:
            x = projector.layer_norm(x)
        result: Tensor = projector.linear_2(projector.act(projector.linear_1(x)))
        return result


def _taps(index: Tensor, size: Tensor, side: int) -> Tensor:
    """Weights of the ``side`` rows of a table for each index below ``size``, (index, side)."""
    ratio = side / size.float()
    centre = (index.float() + 0.5) * ratio
    distance = (torch.arange(side) + 0.5 - centre[:, None]).abs() / ratio.clamp(min=1.0)
    weights = (1 - distance).clamp(min=0)
    return weights / weights.sum(-1, keepdim=True)


def tower(model: LibraryObject) -> VisionTower:
    """Return the tower of a model with its language model."""
    vision = model.config.vision_config
    return VisionTower(
        module=SiglipVision(model.model).eval(),
        image_token=model.config.image_token_id,
        merge=model.config.downsample_factor,
        channels=vision.num_channels * vision.patch_size**2,
        width=model.config.get_text_config().hidden_size,
        grid_positions=False,
        inputs=_inputs,
    )


def _inputs(ids: Tensor, image_token: int, images: Images) -> dict[str, Tensor]:
    """Images padded to the one with the most patches."""
    longest = max(len(pixels) for pixels, _ in images)
    mask = torch.zeros(len(images), longest, dtype=torch.int64)
    values = images[0][0].new_zeros(len(images), longest, images[0][0].shape[1])
    for index, (pixels, _) in enumerate(images):
        values[index, : len(pixels)], mask[index, : len(pixels)] = pixels, 1
    grids = torch.stack([grid for _, grid in images])
    return {"pixel_values": values, "spatial_shapes": grids, "pixel_attention_mask": mask}
