"""Mamba2's scan in transformers -> ``linexport.LinearAttention``, update rule gated.

    delta_t = clamp(softplus(dt_t + bias))                          per head
    S_t = exp(delta_t A) S_{t-1} + B_t (delta_t x_t)^T,   y_t = S_t^T C_t + D x_t

that is, query C, key B, value delta x and decay delta A, with scale 1; x (B, T, H, P), dt
(B, T, H), A and D (H), B and C (B, T, G, N), each of the G groups serving H / G heads in a row. The
library keeps the transpose of S as its state.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from linexport.patches import Patch, Swap
from linexport.patches.state_cache import active


def chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    **kwargs: object,
) -> object:
    """Stands in for ``mamba2_chunk_scan``."""
    delta = dt if dt_bias is None else dt + dt_bias
    delta = F.softplus(delta) if dt_softplus else delta
    low, high = dt_limit
    if high < math.inf or not (dt_softplus and low <= 0):  # softplus is positive
        delta = torch.clamp(delta, min=low, max=high)
    output, state = active().attend(
        C, B, hidden_states * delta[..., None], decay=A * delta, update_rule="gated", scale=1.0
    )
    if D is not None:
        output = output + D[:, None] * hidden_states
    return (output, state) if return_final_states else output


PATCH = Patch(
    swaps=(Swap("mamba2_chunk_scan", chunk_scan),),
    families=("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"),
)
