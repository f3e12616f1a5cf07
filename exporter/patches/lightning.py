"""MiniMax's lightning attention in transformers -> ``linexport.LinearAttention``, rule gated.

    S_t = exp(-slope) S_{t-1} + k_t v_t^T,   o_t = S_t^T q_t       slope constant, per head

The recurrence is written out in the layer's own forward, so that is replaced as a whole:

    q, k, v = split(act(W_qkv x)),   y = W_o (sigmoid(W_g x) * norm(o))
"""

from __future__ import annotations

import torch
from torch import Tensor

from linexport.patches import Patch, Swap
from linexport.patches.state_cache import active
from linexport.system.untyped import LibraryObject


def forward(
    self: LibraryObject,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    cache: LibraryObject = None,
    **kwargs: LibraryObject,
) -> tuple[Tensor, None]:
    """Stands in for ``MiniMaxLightningAttention.forward``."""
    mixed = self.act_fn(self.qkv_proj(hidden_states))
    heads = mixed.unflatten(-1, (self.num_attention_heads, 3 * self.head_dim))
    query, key, value = heads.split(self.head_dim, dim=-1)
    decay = (-self.slope_rate).flatten().expand(*mixed.shape[:2], -1)
    output, _ = active().attend(
        query,
        key,
        value,
        layer=f"{self.layer_idx}",
        decay=decay,
        update_rule="gated",
        scale=1.0,
    )
    output = self.norm(output.flatten(2))
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * output), None


PATCH = Patch(
    swaps=(Swap("MiniMaxLightningAttention.forward", forward),),
    families=("minimax",),
)
