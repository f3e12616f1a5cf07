"""Mamba's selective scan in transformers -> ``linexport.LinearAttention``, update rule gated.

    delta_t = softplus(dt_t + bias)                                 per channel
    S_t = exp(delta_t A) * S_{t-1} + B_t (delta_t x_t)^T,   y_t = S_t^T C_t + D x_t

one head per channel: query C and key B shared by all of them, value delta x of width 1, and a decay
delta A of its own for each of the N entries of a channel's state, handed on as its two factors.
x and dt (B, D, T), A (D, N), B and C (B, N, T), y (B, D, T), times silu(z) where there is a gate.
The library's function takes no state to begin with; this one does.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from linexport.patches import Patch, Swap
from linexport.patches.state_cache import active


def selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **kwargs: Any,
) -> Any:
    """Stands in for ``mamba_selective_scan``."""
    x, delta = hidden_states.transpose(1, 2), dt.transpose(1, 2)
    delta = delta if delta_bias is None else delta + delta_bias
    delta = F.softplus(delta) if delta_softplus else delta
    output, state = active().attend(
        C.transpose(1, 2).unsqueeze(2),
        B.transpose(1, 2).unsqueeze(2),
        (delta * x).unsqueeze(-1),
        decay=delta,
        decay_scale=A,
        update_rule="gated",
        scale=1.0,
    )
    output = output.squeeze(-1)
    output = output if D is None else output + x * D
    output = output.transpose(1, 2)
    output = output if z is None else output * F.silu(z)
    return (output, state) if return_last_state else output


PATCH = Patch(
    swaps=(
        Swap(
            "mamba_selective_scan",
            (
                *("hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus"),
                *("return_last_state", "use_mambapy", "use_associative_scan", "kwargs"),
            ),
            selective_scan,
        ),
    ),
    families=("falcon_mamba", "jamba", "mamba", "zamba"),
    tried=("transformers 5.23.0",),
)
