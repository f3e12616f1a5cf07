"""The recurrent block of RecurrentGemma -> ``CausalConvWithState`` and ``LinearAttention``, gated.

    log a_t = -8 softplus(c) sigmoid(W_a x_t)        per channel
    h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigmoid(W_x x_t) x_t,      without the root at position 0

the RG-LRU of Griffin (De et al. 2024, arXiv:2402.19427, section 2.4): one head a channel, whose
query and key are 1. x (B, T, D) is what the convolution gives.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from linexport.patches import Patch, Swap
from linexport.patches.state_cache import active
from linexport.system.untyped import LibraryObject

RATE = -8.0
"""The constant c of the paper, negated."""


def forward(
    self: LibraryObject,
    input_states: Tensor,
    position_ids: Tensor,
    attention_mask: Tensor | None,
    use_cache: bool = True,
    **kwargs: LibraryObject,
) -> tuple[Tensor, None]:
    """Stands in for ``RecurrentGemmaRecurrentBlock.forward``."""
    states = active()
    layer = states.next_layer()
    gate = self.act_fn(self.linear_y(input_states))
    x = self.linear_x(input_states).transpose(1, 2)
    states.begin_convolution(layer)
    x = states.convolve(x, self.conv_1d.weight.squeeze(1), self.conv_1d.bias, None).transpose(1, 2)
    output = _recurrence(self.rg_lru, x, position_ids, layer)
    return self.linear_out(output * gate), None


def _recurrence(unit: LibraryObject, x: Tensor, positions: Tensor, layer: str) -> Tensor:
    heads = x.unflatten(2, (unit.num_attention_heads, unit.block_width))

    def gate(weight: Tensor, bias: Tensor) -> Tensor:
        return torch.sigmoid((torch.einsum("bthi,hij->bthj", heads, weight) + bias).flatten(2))

    rate = RATE * F.softplus(unit.recurrent_param)
    decay = rate * gate(unit.recurrent_gate_weight, unit.recurrent_gate_bias)
    scale = torch.sqrt(1 - torch.exp(2 * decay))
    scale = torch.where(positions[..., None] == 0, 1.0, scale)
    value = x * gate(unit.input_gate_weight, unit.input_gate_bias) * scale
    return active().accumulate(value, decay, layer)


PATCH = Patch(
    swaps=(Swap("RecurrentGemmaRecurrentBlock.forward", forward),),
    families=("recurrent_gemma",),
)
