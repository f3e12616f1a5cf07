"""Softmax attention of transformers and its mask, in few operators.

    eager_attention_forward: query (B, H, T, d), key and value (B, H_kv, S, d), mask (B, 1, T, S)
    mask_(b, 0, t, s) = 0 if s <= S - T + t and token s of row b is not padding, else the lowest

With a sliding window of W tokens the keys are those of the W - 1 tokens before the call and of the
call, S = W - 1 + T, and only those of s >= t are seen.

The library repeats keys and values H / H_kv times, all of the past at every token. Here the queries
of the heads that share keys are multiplied by the same keys instead. Its mask gathers the
padding mask at every pair of positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linexport.errors import UnsupportedModelError
from linexport.patches import Patch, Swap
from linexport.system.untyped import LibraryObject


def eager_attention_forward(
    module: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor]:
    """Output (B, T, H, d) and weights (B, H, T, S).

    A position_bias (B, H, T, S) is added to the scores. Sinks (B, H, T, 1) are the scores of one
    more key, whose value is zero.
    """
    added = attention_mask
    if position_bias is not None:
        added = position_bias if added is None else position_bias + added
    output, weights = attend(query, key, value, added, scaling, sinks)
    return output.transpose(1, 2).contiguous(), weights


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, d_v) and weights (B, H, T, S); the heads of key and value divide H."""
    groups, length = key.shape[1], query.shape[2]
    served = query.shape[1] // groups
    # The queries of all heads that share keys, one below the other: one product of matrices.
    rows = query.unflatten(1, (groups, served)).flatten(2, 3)
    scores = rows @ key.transpose(2, 3) * scaling
    by_head = mask is not None and mask.shape[1] > 1
    if by_head:
        # Rows of a mask for every head would have to be copied together.
        scores, value = scores.unflatten(2, (served, length)), value[:, :, None]

    def placed(x: Tensor) -> Tensor:
        return x.unflatten(1, (groups, served)) if by_head else _by_row(x, groups, served)

    if mask is not None:
        scores = scores + placed(mask)
    if sinks is not None:
        scores = torch.cat([scores, placed(sinks)], -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    if sinks is not None:
        weights = weights.narrow(-1, 0, key.shape[2])
    found = (weights @ value, weights)
    output, weights = found if by_head else (x.unflatten(2, (served, length)) for x in found)
    return output.flatten(1, 2), weights.flatten(1, 2)


def _by_row(mask: Tensor, groups: int, served: int) -> Tensor:
    """(B, groups or 1, served T, S) of (B, H or 1, T, S), the heads that share keys in order."""
    # Not a reshape, whose strides torch would compare in terms that it cannot order: T S and S.
    if mask.shape[1] == 1:
        # One row for all queries, as without an order of tokens, broadcasts.
        return mask if mask.shape[2] == 1 else torch.cat([mask] * served, 2)
    return torch.cat(mask.unflatten(1, (groups, served)).unbind(2), 2)


def create_causal_mask(
    config: object,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    cache: object,
    position_ids: Tensor | None = None,
    or_mask_function: object = None,
    and_mask_function: object = None,
    block_sequence_ids: Tensor | None = None,
    layer_idx: int | None = None,
    allow_is_causal_skip: bool = True,
) -> Tensor:
    """(B, 1, T, past + T), for an attention_mask (B, past + T), or (1, 1, T, T) without one.

    Raises:
        UnsupportedModelError: the requested mask is of another kind.
    """
    _check_kind(config, or_mask_function, and_mask_function, block_sequence_ids)
    if attention_mask is None:
        places = torch.arange(inputs_embeds.shape[1])
        return _filled((places <= places[:, None])[None, None], inputs_embeds)
    total = attention_mask.shape[1]
    columns = torch.arange(total)
    rows = columns[total - inputs_embeds.shape[1] :]
    return _added(columns <= rows[:, None], attention_mask, inputs_embeds)


def create_sliding_window_causal_mask(
    config: LibraryObject,
    inputs_embeds: Tensor,
    attention_mask: Tensor,
    cache: LibraryObject,
    position_ids: Tensor | None = None,
    or_mask_function: Any = None,
    and_mask_function: Any = None,
    block_sequence_ids: Tensor | None = None,
    layer_idx: int | None = None,
    allow_is_causal_skip: bool = True,
) -> Tensor:
    """(B, 1, T, W - 1 + T), for an attention_mask (B, past + T) and a window of W tokens.

    Raises:
        UnsupportedModelError: the requested mask is of another kind.
    """
    _check_kind(config, or_mask_function, and_mask_function, block_sequence_ids)
    kept, length = config.sliding_window - 1, inputs_embeds.shape[1]
    before = attention_mask.shape[1] - length
    # Tokens before the first one are padding.
    mask = F.pad(attention_mask, (kept, 0)).narrow(1, before, kept + length)
    columns, first = torch.arange(kept + length), torch.arange(length)[:, None]
    return _added((columns >= first) & (columns <= first + kept), mask, inputs_embeds)


def _check_kind(config: object, *changed: object) -> None:
    if any(x is not None for x in changed) or not getattr(config, "is_causal", True):
        raise UnsupportedModelError(
            f"{type(config).__name__} asks for attention that is not just causal and padded; "
            "linexport converts no other."
        )


def _added(seen: Tensor, mask: Tensor, inputs_embeds: Tensor) -> Tensor:
    """Return what is added to scores, for keys seen (T, S) and a mask of padding (B, S)."""
    return _filled(seen & mask.bool()[:, None, None], inputs_embeds)


def _filled(seen: Tensor, inputs_embeds: Tensor) -> Tensor:
    """Return what is added to scores: 0 for keys seen, else the lowest number."""
    lowest = torch.finfo(inputs_embeds.dtype).min
    return torch.where(seen, 0.0, lowest).to(inputs_embeds.dtype)


PATCH = Patch(
    swaps=(
        Swap("eager_attention_forward", eager_attention_forward),
        Swap("create_causal_mask", create_causal_mask),
        Swap("create_sliding_window_causal_mask", create_sliding_window_causal_mask),
    ),
    families=(
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "granitemoehybrid",
        "inkling",
        "inkling2",
        "inkling2_loop",
        "jamba",
        "kimi_linear",
        "lara_mini",
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
        "zaya",
    ),
)
