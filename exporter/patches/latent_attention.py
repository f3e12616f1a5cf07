"""Multi-head latent attention of transformers, on the latents it keeps of keys and values.

    k_s = [W_k c_s, r_s],   v_s = W_v c_s          per head; c_s (rank) and r_s shared by all heads
    q_t . k_s = (W_k^T q'_t) . c_s + q''_t . r_s       sum_s w_s v_s = W_v sum_s w_s c_s

The library expands the keys and values of the whole past at every call, which is the left side. On
the right, the absorbed form of DeepSeek-V2 (arXiv:2405.04434, section 2.1.2), all heads attend to
the latents themselves: per head and token of the past 2 rank products in place of d_k + d_v, and
none to expand it. A step takes a fraction, from any past; a long prompt from none, more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linexport.patches import Patch, Swap
from linexport.patches.softmax_attention import attend


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
    latent, shared = compressed.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
    latent, shared = self.kv_a_layernorm(latent).unsqueeze(1), shared.unsqueeze(1)
    if past_key_values is not None:
        latent, shared = past_key_values.update(latent, shared, self.layer_idx)

    widths = (self.qk_nope_head_dim, self.v_head_dim)
    heads = self.kv_b_proj.weight.unflatten(0, (self.num_heads, sum(widths)))
    to_key, to_value = heads[:, : widths[0]], heads[:, widths[0] :]
    query = torch.cat([query[..., : widths[0]] @ to_key, query[..., widths[0] :]], -1)
    seen = torch.cat([latent, shared], -1)
    output, _ = attend(query, seen, latent, attention_mask, self.scaling)
    output = output @ to_value.transpose(1, 2)
    return self.o_proj(output.transpose(1, 2).flatten(2)), None


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
