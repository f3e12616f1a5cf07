"""The generalised delta rule in PyTorch: differentiable, token by token.

Traced and called as ``linexport.models.functional`` describes. Shapes and formulas:
``linexport.plugins.ops.generalized_delta_rule``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linexport.plugins.ops.generalized_delta_rule import check


def generalized_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    a: Tensor,
    b: Tensor,
    past_state: Tensor | None = None,
    key_mask: Tensor | None = None,
    *,
    num_heads: int,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Output, in the dtype of the inputs, and present_state.

    Half-precision inputs are computed in float32, and the state is then float32.

    Raises:
        OpError: shapes that contradict the op.
    """
    tensors = (query, key, value, decay, a, b, past_state, key_mask)
    if torch.compiler.is_exporting():
        out: tuple[Tensor, Tensor] = torch.ops.linexport.generalized_delta_rule(
            *tensors, num_heads=num_heads, scale=scale
        )
        return out
    return recurrent(*tensors, num_heads=num_heads, scale=scale)


def recurrent(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    a: Tensor,
    b: Tensor,
    past_state: Tensor | None,
    key_mask: Tensor | None,
    *,
    num_heads: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """``generalized_delta_rule`` in plain PyTorch; a plain export of the loop unrolls."""
    inputs = (query, key, value, decay, a, b, past_state, key_mask)
    sizes = check(num_heads, *(None if x is None else tuple(x.shape) for x in inputs))  # type: ignore[arg-type]
    dtype = torch.promote_types(query.dtype, torch.float32)
    q, k, v, g, read, write = (
        x.to(dtype).unflatten(-1, (num_heads, x.shape[-1] // num_heads))
        for x in (query * scale, key, value, decay, a, b)
    )
    if key_mask is not None:
        keep = key_mask[:, :, None, None]
        k, g, read = (torch.where(keep, x, 0.0) for x in (k, g, read))
    S = v.new_zeros(query.shape[0], num_heads, sizes.d_k, sizes.d_v)
    if past_state is not None:
        S = past_state.to(dtype)
    alpha = g.exp()
    outputs = [v.new_zeros(query.shape[0], 0, num_heads, sizes.d_v)]
    for t in range(query.shape[1]):
        found = read[:, t, :, None] @ S
        S = alpha[:, t, :, :, None] * S + write[:, t, :, :, None] * found
        S = S + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append((q[:, t, :, None] @ S).transpose(1, 2))
    return torch.cat(outputs, 1).flatten(2).to(query.dtype), S
