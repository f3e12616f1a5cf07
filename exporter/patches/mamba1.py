"""Mamba's selective scan, of transformers and mamba-ssm -> ``LinearAttention``, update rule gated.

    delta_t = softplus(dt_t + bias)                                 per channel
    S_t = exp(delta_t A) * S_{t-1} + B_t (delta_t x_t)^T,   y_t = S_t^T C_t + D x_t

one head per channel: query C and key B shared by all of them, value delta x of width 1, and a decay
delta A of its own for each of the N entries of a channel's state, handed on as its two factors.
x and dt (B, D, T), A (D, N), B and C (B, N, T), y (B, D, T), times silu(z) where there is a gate.
The libraries' functions take no state to begin with; this one does. Of mamba-ssm, B and C may have
groups of channels, (B, G, N, T).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from linexport.errors import UnsupportedModelError
from linexport.patches import Patch, Swap
from linexport.patches.packages import Function
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
    **kwargs: object,
) -> Any:
    """Stands in for ``mamba_selective_scan``."""
    x, delta = hidden_states.transpose(1, 2), dt.transpose(1, 2)
    delta = delta if delta_bias is None else delta + delta_bias
    delta = F.softplus(delta) if delta_softplus else delta
    output, state = active().attend(
        _groups(C),
        _groups(B),
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


def _groups(x: Tensor) -> Tensor:
    """Return (B, T, G, N) of (B, G, N, T), or of (B, N, T), which all channels share."""
    return x.transpose(1, 2).unsqueeze(2) if x.dim() == 3 else x.permute(0, 3, 1, 2)


def of_package(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *rest: Any, **options: Any
) -> Any:
    """Stand in for ``selective_scan_ref`` and ``selective_scan_fn``, in the dtype of u."""
    refuse_fixed(A, B, C)
    dtype = u.dtype
    u, delta, A, B, C = (x.float() if x.itemsize < 4 else x for x in (u, delta, A, B, C))
    found = selective_scan(u, delta, A, B, C, *rest, **options)
    if not isinstance(found, tuple):
        return found.to(dtype)
    output, state = found
    return output.to(dtype), state.squeeze(-1)


def refuse_fixed(A: Tensor, B: Tensor, C: Tensor) -> None:
    """Refuse a scan that is not selective.

    Raises:
        UnsupportedModelError: its rates are complex, or B or C is the same for all tokens.
    """
    if A.is_complex() or B.dim() < 3 or C.dim() < 3:
        raise UnsupportedModelError(
            "A selective scan of mamba-ssm has complex rates, or a B or C that is the same for all "
            f"tokens (A {A.dtype}, B of {B.dim()} and C of {C.dim()} dimensions). Expected real "
            "rates, and B and C of (batch, states, tokens): expand them along the tokens."
        )


PATCH = Patch(
    swaps=(Swap("mamba_selective_scan", selective_scan),),
    families=("falcon_mamba", "jamba", "mamba", "zamba"),
)

FUNCTIONS = (
    Function(
        "mamba_ssm.ops.selective_scan_interface",
        "selective_scan_ref",
        of_package,
        "mamba-ssm 2.2.4",
    ),
)
