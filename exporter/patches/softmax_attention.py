"""Softmax attention of transformers and its mask, in few operators.

    eager_attention_forward: query (B, H, T, d), key and value (B, H_kv, S, d), mask (B, 1, T, S)
    mask_(b, 0, t, s) = 0 if s <= S - T + t and token s of row b is not padding, else the lowest

The library repeats keys and values H / H_kv times, all of the past at every token. Here the queries
of the heads that share keys are multiplied by the same keys instead. Its mask gathers the
padding mask at every pair of positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linexport.errors import UnsupportedModelError
from linexport.patches import Patch, Swap


def eager_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Output (B, T, H, d) and weights (B, H, T, S); a position_bias (B, H, T, S) is added."""
    added = attention_mask
    if position_bias is not None:
        added = position_bias if added is None else position_bias + added
    output, weights = attend(query, key, value, added, scaling)
    return output.transpose(1, 2).contiguous(), weights


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, d_v) and weights (B, H, T, S); the heads of key and value divide H."""
    served = query.shape[1] // key.shape[1]
    # The queries of all heads that share keys, one below the other: one product of matrices.
    rows = query.unflatten(1, (key.shape[1], served)).flatten(2, 3)
    scores = (rows @ key.transpose(2, 3) * scaling).unflatten(2, (served, query.shape[2]))
    scores = scores.flatten(1, 2)
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    rows = weights.unflatten(1, (key.shape[1], served)).flatten(2, 3)
    output = (rows @ value).unflatten(2, (served, query.shape[2])).flatten(1, 2)
    return output, weights


def create_causal_mask(
    config: Any,
    inputs_embeds: Tensor,
    attention_mask: Tensor,
    past_key_values: Any,
    position_ids: Tensor | None = None,
    or_mask_function: Any = None,
    and_mask_function: Any = None,
    block_sequence_ids: Tensor | None = None,
    layer_idx: int | None = None,
    allow_is_causal_skip: bool = True,
) -> Tensor:
    """(B, 1, T, past + T), for an attention_mask (B, past + T).

    Raises:
        UnsupportedModelError: the mask that is asked for is of another kind.
    """
    changed = (or_mask_function, and_mask_function, block_sequence_ids)
    if any(x is not None for x in changed) or not getattr(config, "is_causal", True):
        raise UnsupportedModelError(
            f"{type(config).__name__} asks for attention that is not just causal and padded; "
            "linexport converts no other."
        )
    total = attention_mask.shape[1]
    columns = torch.arange(total)
    rows = columns[total - inputs_embeds.shape[1] :]
    seen = (columns <= rows[:, None]) & attention_mask.bool()[:, None, None]
    lowest = torch.finfo(inputs_embeds.dtype).min
    return torch.where(seen, 0.0, lowest).to(inputs_embeds.dtype)


PATCH = Patch(
    swaps=(
        Swap(
            "eager_attention_forward",
            ("module", "query", "key", "value", "attention_mask", "scaling", "dropout", "kwargs"),
            eager_attention_forward,
            optional=("position_bias",),
        ),
        Swap(
            "create_causal_mask",
            (
                "config",
                "inputs_embeds",
                "attention_mask",
                "past_key_values",
                "position_ids",
                "or_mask_function",
                "and_mask_function",
                "block_sequence_ids",
                "layer_idx",
                "allow_is_causal_skip",
            ),
            create_causal_mask,
        ),
    ),
    families=(
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "granitemoehybrid",
        "inkling",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_next",
        "recurrent_gemma",
        "zamba",
        "zamba2",
    ),
    tried=("transformers 5.23.0",),
)
