"""Places of an image's patches from its grid, in tensors: nothing of it is a size of the trace.

    patch i of a grid of h x w, in blocks of m x m:

    block, inner     = i div m^2, i mod m^2
    row, column      = m (block div w/m) + inner div m,  m (block mod w/m) + inner mod m

With m = 1 the order is row by row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.export import Dim

from linexport.sources.loaded_model import LoadedModel, Source, VisionTower


def places(count: int, width: Tensor, merge: int = 1) -> tuple[Tensor, Tensor]:
    """Return row and column of each patch, (count,) int64.

    Args:
        count: number of patches.
        width: columns of the grid, () int64.
        merge: patches along each side of a block.
    """
    index, blocks = torch.arange(count), width // merge
    block, inner = index // merge**2, index % merge**2
    row = block // blocks * merge + inner // merge
    return row, block % blocks * merge + inner % merge


def draw(vision: VisionTower, rows: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return pixel values and the grid of an image of ``rows`` x ``columns`` tokens."""
    grid = torch.tensor([rows, columns]) * vision.merge
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(grid.prod()), vision.channels, generator=generator), grid


def example_tower(vision: VisionTower, source: Source) -> LoadedModel:
    """Return a tower as a model to trace."""
    tokens = Dim("image_tokens")
    return LoadedModel(
        module=vision.module,
        args=draw(vision, 3, 5, 0),
        kwargs={},
        dynamic_shapes=({0: vision.merge**2 * tokens}, None),
        source=source,
        outputs=("image_features",),
    )
