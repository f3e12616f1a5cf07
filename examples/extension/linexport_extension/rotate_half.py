"""A patch of transformers: ``rotate_half`` of rotary positions, by a product with signs.

    [x_1, x_2] -> [-x_2, x_1]

Any function of a modeling file can be swapped so; those of linexport put ops in place of loops.
"""

import torch

from linexport.patches import Patch, Swap


def rotate_half(x):
    """Stand in for the library's function while a model is traced."""
    half = x.shape[-1] // 2
    sign = torch.ones(2 * half, dtype=x.dtype)
    sign[:half] = -1
    return torch.cat((x[..., half:], x[..., :half]), dim=-1) * sign


PATCH = Patch(
    swaps=(Swap("rotate_half", rotate_half),),
    families=("lfm2",),
)
