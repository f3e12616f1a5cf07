"""The short convolution of Inkling 2 with taps of its own for each token, on a window of inputs.

    y_t = (x_t + sum_j (w_j + W_j u_t) x_{t-j}) / sqrt(2 k + 1),    j = 0 .. k - 1

x (B, T, C) and u (B, T, D); W_j u_t is one number a head, w_j one a channel. The taps of
``CausalConvWithState`` are the same for all tokens.
"""

from __future__ import annotations

import math

from torch import Tensor

from linexport.patches import Patch, Swap
from linexport.patches.state_cache import active
from linexport.system.untyped import LibraryObject


def forward(
    self: LibraryObject,
    hidden_states: Tensor,
    dynamic_input: Tensor,
    cache: LibraryObject = None,
    conv_mask: Tensor | None = None,
    cache_offset: int = 0,
    **kwargs: LibraryObject,
) -> Tensor:
    """Stands in for ``Inkling2DynamicShortConvolution.forward``.

    A layer that is run several times keeps its inputs for each pass: ``cache_offset`` layers on.
    """
    size, heads, length = self.conv_kernel_size, self.num_heads, hidden_states.shape[1]
    states = active()
    states.begin_convolution(f"{self.layer_idx + cache_offset}_{self.conv_idx}")
    inputs = states.window(hidden_states.transpose(1, 2), size - 1).transpose(1, 2)
    own = self.weight_proj(dynamic_input).unflatten(2, (heads, 1, size))
    total = hidden_states
    for lag in range(size):
        taps = self.static_weight[lag].unflatten(0, (heads, -1)) + own[..., lag]
        total = total + inputs.narrow(1, size - 1 - lag, length) * taps.flatten(2)
    return total / math.sqrt(2 * size + 1)


PATCH = Patch(
    swaps=tuple(
        Swap(f"{family}DynamicShortConvolution.forward", forward)
        for family in ("Inkling2", "Inkling2Loop")
    ),
    families=("inkling2", "inkling2_loop"),
)
