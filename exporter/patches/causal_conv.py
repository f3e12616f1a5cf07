"""Short causal convolutions of transformers -> ``linexport.CausalConvWithState``.

    causal_conv1d_fn(x, weight, bias, activation): x (B, C, T), weight (C, k)

The library prepends the cached inputs to x and cuts the output; the op holds them as its state. Its
twin for a single token updates the cache in place and is not called here: a traced length is never
known to be 1.

    apply_mask_to_padding_states(x, mask): x (B, T, C) with zeros for padded tokens

is what the library calls in front of the projection and behind the convolution. The ops leave
padding out themselves, see ``state_cache``.
"""

from __future__ import annotations

from torch import Tensor

from linexport.patches import Patch, Swap
from linexport.patches.state_cache import active


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: object,
) -> Tensor:
    """Stands in for the function of that name."""
    return active().convolve(hidden_states, weight, bias, activation)


def apply_mask_to_padding_states(hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Stands in for the function of that name."""
    return hidden_states


PATCH = Patch(
    swaps=(
        Swap("causal_conv1d_fn", causal_conv1d_fn),
        Swap("apply_mask_to_padding_states", apply_mask_to_padding_states),
    ),
    families=("inkling", "inkling2", "inkling2_loop", "lfm2", "lfm2_moe", "lfm3"),
)
