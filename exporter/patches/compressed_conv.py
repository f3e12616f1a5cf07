"""Queries, keys and values of compressed convolutional attention (ZAYA, arXiv:2510.04476).

    q, k = conv_heads(conv_channels([W_q x, W_k x])) + their mean over the heads that share a key
    v_t  = [V x_t, V' x_{t-1}]

The first convolution is of each channel, the second of each head, one after another: the state is a
window of the inputs of the first. The token before is a window, too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from linexport.patches import Patch, Swap
from linexport.patches.state_cache import active
from linexport.system.untyped import LibraryObject


def forward(
    self: LibraryObject,
    hidden_states: Tensor,
    cache: LibraryObject,
    conv_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Stands in for ``ZayaCCAProjection.forward``: query, key and value (B, T, H, d)."""
    states, width, x = active(), self.head_dim, hidden_states
    query, key = self.q_proj(x), self.k_proj(x)
    heads, served = self.num_key_value_heads, self.num_key_value_groups
    mean = query.unflatten(2, (heads, served, width)) + key.unflatten(2, (heads, 1, width))
    mean = mean * 0.5

    states.begin_convolution(f"{self.layer_idx}_0")
    mixed = states.window(torch.cat([query, key], -1).transpose(1, 2), self.conv_kernel_size)
    mixed = self.conv_qk_grouped(self.conv_qk_depthwise(mixed)).transpose(1, 2)
    mixed = mixed.unflatten(2, (-1, width))
    query = mixed[:, :, : heads * served] + mean.flatten(2, 3)
    key = mixed[:, :, heads * served :] + mean.mean(3)

    states.begin_convolution(f"{self.layer_idx}_1")
    # The bias is added behind the window: before the first token it is what the zeros give.
    delayed = F.linear(x, self.v_proj_delayed.weight)
    delayed = states.window(delayed.transpose(1, 2), 1).transpose(1, 2).narrow(1, 0, x.shape[1])
    if self.v_proj_delayed.bias is not None:
        delayed = delayed + self.v_proj_delayed.bias
    value = torch.cat([self.v_proj_current(x), delayed], -1).unflatten(2, (-1, width))
    return query, key, value


PATCH = Patch(
    swaps=(Swap("ZayaCCAProjection.forward", forward),),
    families=("zaya",),
)
