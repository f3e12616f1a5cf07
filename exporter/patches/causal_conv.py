"""Short causal convolutions of transformers -> ``linexport.CausalConvWithState``.

    causal_conv1d_fn(x, weight, bias, activation): x (B, C, T), weight (C, k)

The library prepends the cached inputs to x and cuts the output; the op holds them as its state. Its
twin for a single token updates the cache in place and is not called here: a traced length is never
known to be 1.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from linexport.patches import Patch, Swap
from linexport.patches.state_cache import active


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """Stands in for the function of that name."""
    return active().convolve(hidden_states, weight, bias, activation)


PATCH = Patch(
    swaps=(Swap("causal_conv1d_fn", causal_conv1d_fn),),
    families=("inkling", "inkling2", "lfm2", "lfm2_moe", "lfm3"),
)
