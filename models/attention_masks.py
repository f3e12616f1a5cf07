"""Masks of softmax attention that say no more than which keys are there.

    keys      every query sees the same keys                  m_ts = seen_s
    causal    and none that come after it                     m_ts = seen_s and s <= t

In both, the last query sees all keys that are seen at all: ``seen_s = m_(T-1)s``. Anything else,
such as a bias or a window, is not a product of feature maps of q and k.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HIDDEN = -1e4
"""Scores are lowered at least so far to hide a key; a bias that is learned or ALiBi's is not."""


def visible(mask: Tensor) -> Tensor | None:
    """True where a key is seen, in the shape of a boolean or additive mask; None for a bias."""
    if mask.dtype == torch.bool:
        return mask
    seen, hidden = mask == 0, mask <= _HIDDEN
    return seen if bool((seen | hidden).all()) else None


def understood(mask: Tensor, length: int, keys: int) -> str:
    """Return "keys" or "causal", or the reason why the mask is neither.

    Args:
        mask: broadcastable to (B, H, T, S), boolean or additive.
        length: T.
        keys: S.
    """
    seen = visible(mask)
    if seen is None:
        return "its mask is a bias added to the scores, which no feature map of q and k has"
    while seen.dim() < 4:
        seen = seen[None]
    if not bool((seen == seen[:, :1]).all()):
        return "its mask differs from head to head"
    seen = seen[:, 0].expand(-1, length, keys)
    last = seen[:, -1:]
    # Padded queries may see anything; where lengths differ, none is known to be one.
    valid_queries = last.mT if length == keys else torch.ones_like(seen[:, :, :1])
    if bool(((seen == last) | ~valid_queries).all()):
        return "keys"
    if length == keys and bool(((seen == (last & _causal(length, seen))) | ~valid_queries).all()):
        return "causal"
    return "its mask is neither causal nor one of keys: a window or a pattern of its own"


def key_mask(mask: Tensor, batch: int, keys: int) -> Tensor:
    """(B, S), True for keys that are there; of a mask that is ``understood``."""
    seen = mask if mask.dtype == torch.bool else mask == 0
    while seen.dim() < 4:
        seen = seen[None]
    return seen[:, 0, -1].expand(batch, keys)


def _causal(length: int, like: Tensor) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=like.device).tril()
