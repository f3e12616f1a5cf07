"""Multi-head latent attention of transformers, on the latents it keeps of keys and values.

    k_s = [W_k c_s, r_s],   v_s = W_v c_s          per head; c_s (rank) and r_s shared by all heads
    q_t . k_s = (W_k^T q'_t) . c_s + q''_t . r_s       sum_s w_s v_s = W_v sum_s w_s c_s

The library expands the keys and values of the whole past at every call, which is the left side. For
few tokens the right side takes less: attention of all heads to the same latents (the absorbed form
of DeepSeek-V2, arXiv:2405.04434, section 2.1.2). Per head and pair of positions that is 2 rank
products in place of d_k + d_v; expanding is rank (d_k + d_v) for each position of the past. So few
tokens are T <= rank (d_k + d_v) / (2 rank - d_k - d_v).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from linexport.patches import Patch, Swap
from linexport.patches.attention import attend


def forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stands in for ``KimiLinearAttention.forward``."""
    if self.q_lora_rank is None:
        query = self.q_proj(hidden_states)
    else:
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
    query = query.unflatten(2, (self.num_heads, self.qk_head_dim)).transpose(1, 2)
    compressed = self.kv_a_proj_with_mqa(hidden_states)
    latent, rotary = compressed.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
    latent, rotary = self.kv_a_layernorm(latent).unsqueeze(1), rotary.unsqueeze(1)
    if past_key_values is not None:
        latent, rotary = past_key_values.update(latent, rotary, self.layer_idx)

    def expanded(query: Tensor, latent: Tensor, rotary: Tensor, mask: Tensor) -> Tensor:
        return _expanded(self, query, latent, rotary, mask)

    def absorbed(query: Tensor, latent: Tensor, rotary: Tensor, mask: Tensor) -> Tensor:
        return _absorbed(self, query, latent, rotary, mask)

    few = most_absorbed(self.kv_lora_rank, self.qk_nope_head_dim + self.v_head_dim)
    operands = (query, latent.squeeze(1), rotary.squeeze(1), attention_mask)
    if few is None:
        output = absorbed(*operands)
    else:
        output = _either(query.shape[2] <= few, absorbed, expanded, operands)
    return self.o_proj(output.transpose(1, 2).flatten(2)), None


def most_absorbed(rank: int, widths: int) -> int | None:
    """The most tokens for which the absorbed form takes fewer products; None for any number.

    ``widths`` is d_k + d_v.
    """
    more = 2 * rank - widths
    return rank * widths // more if more > 0 else None


def _expanded(self: Any, query: Tensor, latent: Tensor, rotary: Tensor, mask: Tensor) -> Tensor:
    """Output (B, H, T, d_v), for a query (B, H, T, d_k), latents (B, S, rank)."""
    widths = [self.qk_nope_head_dim, self.v_head_dim]
    both = self.kv_b_proj(latent).unflatten(2, (self.num_heads, sum(widths))).transpose(1, 2)
    key, value = both[..., : widths[0]], both[..., widths[0] :]
    rotary = rotary.unsqueeze(1).expand(-1, self.num_heads, -1, -1)
    return attend(query, torch.cat([key, rotary], -1), value, mask, self.scaling)[0]


def _absorbed(self: Any, query: Tensor, latent: Tensor, rotary: Tensor, mask: Tensor) -> Tensor:
    """The same."""
    widths = [self.qk_nope_head_dim, self.v_head_dim]
    heads = self.kv_b_proj.weight.unflatten(0, (self.num_heads, sum(widths)))
    to_key, to_value = heads[:, : widths[0]], heads[:, widths[0] :]
    query = torch.cat([query[..., : widths[0]] @ to_key, query[..., widths[0] :]], -1)
    seen, latent = torch.cat([latent, rotary], -1).unsqueeze(1), latent.unsqueeze(1)
    return attend(query, seen, latent, mask, self.scaling)[0] @ to_value.transpose(1, 2)


def _either(
    condition: Any,
    then: Callable[..., Tensor],
    otherwise: Callable[..., Tensor],
    operands: tuple[Tensor, ...],
) -> Tensor:
    """One of two functions, chosen when the graph runs if the condition is about its sizes."""
    if isinstance(condition, bool):
        return (then if condition else otherwise)(*operands)
    output: Tensor = torch.cond(condition, then, otherwise, operands)
    return output


PATCH = Patch(
    swaps=(
        Swap(
            "KimiLinearAttention.forward",
            ("self", "hidden_states", "attention_mask", "past_key_values", "kwargs"),
            forward,
        ),
    ),
    families=("kimi_linear",),
    tried=("transformers 5.23.0",),
)
