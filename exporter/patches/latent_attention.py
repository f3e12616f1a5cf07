"""Multi-head latent attention of transformers, on the latents it keeps of keys and values.

    k_s = [W_k c_s, r_s],   v_s = W_v c_s          per head; c_s (rank) and r_s shared by all heads
    q_t . k_s = (W_k^T q'_t) . c_s + q''_t . r_s       sum_s w_s v_s = W_v sum_s w_s c_s

The library expands the keys and values of the whole past at every call, which is the left side. On
the right, the absorbed form of DeepSeek-V2 (arXiv:2405.04434, section 2.1.2), all heads attend to
the latents themselves: per head and token of the past 2 rank products in place of d_k + d_v, and
none to expand it. A step takes a fraction, from any past; a long prompt from none, more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linexport.patches import Patch, Swap
from linexport.patches.softmax_attention import attend
from linexport.system.untyped import LibraryObject


def kimi_forward(
    self: LibraryObject,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    cache: LibraryObject = None,
    **kwargs: LibraryObject,
) -> tuple[Tensor, None]:
    """Stands in for ``KimiLinearAttention.forward``."""
    if self.q_lora_rank is None:
        query = self.q_proj(hidden_states)
    else:
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
    keys = _kept(self, latents(self, hidden_states), cache)
    output = attended(self, queries(self, query), keys, attention_mask)
    return self.o_proj(output.flatten(2)), None


def bailing_forward(
    self: LibraryObject,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    cache: LibraryObject = None,
    **kwargs: LibraryObject,
) -> tuple[Tensor, None]:
    """Stands in for ``BailingHybridAttention.forward``: r and q'' turn, and heads have gates."""
    cos, sin = (x[:, None, :, : x.shape[-1] // 2] for x in position_embeddings)

    def turn(x: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)

    own, turned = queries(self, self.q_proj(hidden_states))
    latent, shared = latents(self, hidden_states)
    keys = _kept(self, (latent, turn(shared)), cache)
    output = attended(self, (own, turn(turned)), keys, attention_mask)
    gate = torch.sigmoid(self.g_proj(hidden_states).float()).to(hidden_states.dtype)
    return self.o_proj((output * gate.unsqueeze(-1)).flatten(2)), None


def queries(self: torch.nn.Module, query: Tensor) -> tuple[Tensor, Tensor]:
    """Return q' (B, H, T, d_k) and q'' (B, H, T, d_r)."""
    heads = query.unflatten(2, (self.num_heads, self.qk_head_dim)).transpose(1, 2)
    own, turned = heads.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
    return own, turned


def latents(self: LibraryObject, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Return c (B, 1, T, rank) and r (B, 1, T, d_r)."""
    compressed = self.kv_a_proj_with_mqa(hidden_states)
    latent, shared = compressed.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
    return self.kv_a_layernorm(latent).unsqueeze(1), shared.unsqueeze(1)


def _kept(
    self: torch.nn.Module, keys: tuple[Tensor, Tensor], cache: LibraryObject
) -> tuple[Tensor, Tensor]:
    """Return c and r with those of the tokens before."""
    if cache is None:
        return keys
    latent, shared = cache.update(*keys, self.layer_idx)
    return latent, shared


def attended(
    self: LibraryObject,
    query: tuple[Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    mask: Tensor | None,
) -> Tensor:
    """Return what the heads give, (B, T, H, d_v), of q' and q'', c and r."""
    widths = (self.qk_nope_head_dim, self.v_head_dim)
    heads = self.kv_b_proj.weight.unflatten(0, (self.num_heads, sum(widths)))
    to_key, to_value = heads[:, : widths[0]], heads[:, widths[0] :]
    absorbed, seen = query[0] @ to_key, keys[0]
    if self.qk_rope_head_dim:
        absorbed, seen = torch.cat([absorbed, query[1]], -1), torch.cat(keys, -1)
    output, _ = attend(absorbed, seen, keys[0], mask, self.scaling)
    return (output @ to_value.transpose(1, 2)).transpose(1, 2)


PATCH = Patch(
    swaps=(
        Swap("KimiLinearAttention.forward", kimi_forward),
        Swap("BailingHybridAttention.forward", bailing_forward),
    ),
    families=("bailing_hybrid", "kimi_linear"),
)
