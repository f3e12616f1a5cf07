"""Batches with padding, as layers of fla take them with an ``attention_mask``.

    unpad   the valid tokens of each row first, in their order, and its padding behind them
    repad   each token in its place again, and zeros in those of padding

The library joins the valid tokens of all rows in one row, whose length is known only when it runs,
and hands the end of each to its kernels. Here each row remains a row, and kernels are given no
ends: they look back alone, so that no valid token sees the padding behind it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from linexport.errors import UnsupportedModelError
from linexport.patches.gpu_kernels import GpuKernel


class Places(NamedTuple):
    """Places of a batch's tokens (B, T) after its padding is moved to the end of each row.

    Attributes:
        place: of each token, int64.
        valid: whether it is one, and not padding.
    """

    place: Tensor
    valid: Tensor


def places_of(mask: Tensor, length: int) -> Places:
    """Return the places of the last tokens of a mask (B, S), 0 at padding."""
    valid = mask[:, -length:] != 0
    before = valid.long().cumsum(1)
    padding = before[:, -1:] + (~valid).long().cumsum(1)
    return Places(torch.where(valid, before, padding) - 1, valid)


def _wide(x: Tensor, like: Tensor) -> Tensor:
    """Return x (B, T) with the trailing sizes of another tensor (B, T, ...)."""
    return x.reshape(*x.shape, *(1 for _ in like.shape[2:])).expand_as(like)


def _moved(x: Tensor, places: Places) -> Tensor:
    return torch.zeros_like(x).scatter(1, _wide(places.place, x), x)


def unpad_hidden_states(
    hidden_states: Tensor,
    cu_seqlens: Tensor | None,
    attention_mask: Tensor | None,
    q_len: int,
) -> tuple[Tensor, Places | None, Tensor | None]:
    """Stand in for ``unpad_hidden_states``: hidden states (B, T, C) with padding behind each row.

    Returns:
        These, what ``repad_hidden_states`` takes, and the given ends of sequences; without a mask
        nothing is moved.
    """
    if cu_seqlens is not None or attention_mask is None:
        return hidden_states, None, cu_seqlens
    places = places_of(attention_mask, q_len)
    # LightNetAttention does not repad a batch of one row and one token, even where that token is
    # padding. Of zeros it computes zeros, as if it had.
    known = torch.where(_wide(places.valid, hidden_states), hidden_states, 0.0)
    return _moved(known, places), places, None


def repad_hidden_states(
    hidden_states: Tensor, indices: Places | None, batch_size: int, q_len: int
) -> Tensor:
    """Stand in for ``repad_hidden_states``, the inverse of ``unpad_hidden_states``."""
    if indices is None:
        return hidden_states
    found = hidden_states.gather(1, _wide(indices.place, hidden_states))
    return torch.where(_wide(indices.valid, found), found, 0.0)


def unpad_input(
    q: Tensor | tuple[Tensor, ...],
    states: tuple[Tensor, ...],
    attention_mask: Tensor,
    q_len: int,
    keepdim: bool = False,
) -> tuple[
    Tensor | tuple[Tensor, ...],
    tuple[Tensor, ...],
    Places,
    tuple[None, None],
    tuple[int, int],
]:
    """Stand in for ``unpad_input``: queries and keys (B, T, ...) with padding behind each row.

    Raises:
        UnsupportedModelError: there are more keys than queries.
    """
    if states[0].shape[1] != q_len:
        raise UnsupportedModelError(
            f"A layer of fla is called with an attention_mask, {q_len} tokens and "
            f"{states[0].shape[1]} keys. Call it with whole sequences alone: the artifact carries "
            "its states itself."
        )
    places = places_of(attention_mask, q_len)
    queries = _moved(q, places) if isinstance(q, Tensor) else tuple(_moved(x, places) for x in q)
    return queries, tuple(_moved(x, places) for x in states), places, (None, None), (q_len, q_len)


def pad_input(hidden_states: Tensor, indices: Places, batch_size: int, seq_len: int) -> Tensor:
    """Stand in for ``pad_input`` of (B, T, H, V), or (T, H, V) of a batch of one."""
    whole = hidden_states[None] if hidden_states.dim() == 3 else hidden_states
    return repad_hidden_states(whole, indices, batch_size, seq_len)


FLA, ROWS = ("fla",), "rows with their padding at the end"

KERNELS = (
    GpuKernel(FLA, ("unpad_hidden_states",), unpad_hidden_states, ROWS, is_recorded=False),
    GpuKernel(FLA, ("repad_hidden_states",), repad_hidden_states, ROWS, is_recorded=False),
    GpuKernel(FLA, ("unpad_input",), unpad_input, ROWS, is_recorded=False),
    GpuKernel(FLA, ("pad_input",), pad_input, ROWS, is_recorded=False),
)
