"""A mixture of experts in PyTorch: differentiable.

Traced and called as ``linexport.models.functional`` describes. Shapes and formula:
``linexport.plugins.ops.mixture_of_experts``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from linexport.plugins.ops.mixture_of_experts import check

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu2": lambda x: F.relu(x).square(),
}
"""act, by the op's names."""


def mixture_of_experts(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    activation: str = "silu",
    gated: bool = True,
) -> Tensor:
    """y (N, H_out), in the dtype of x.

    Raises:
        OpError: unknown activation, or shapes that contradict the op.
    """
    tensors = (x, index, weight, up, down)
    if torch.compiler.is_exporting():
        y: Tensor = torch.ops.linexport.mixture_of_experts(
            *tensors, activation=activation, gated=int(gated)
        )
        return y
    return every_expert(*tensors, activation=activation, gated=int(gated))


def every_expert(
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    activation: str,
    gated: int,
) -> Tensor:
    """``mixture_of_experts`` in plain PyTorch, without sizes that depend on values: all tokens go
    through all experts."""
    tensors = (x, index, weight, up, down)
    check(activation, bool(gated), *(tuple(t.shape) for t in tensors))
    act = ACTIVATIONS[activation]
    h = x @ up.transpose(1, 2)
    if gated:
        gate, value = h.chunk(2, -1)
        h = act(gate) * value
    else:
        h = act(h)
    y = h @ down.transpose(1, 2)
    share = weight.new_zeros(x.shape[0], up.shape[0]).scatter_add(1, index, weight)
    return torch.einsum("ne,enh->nh", share, y).to(x.dtype)
