"""Attention restricted to keys near the query: |q - k|_1 <= delta, smoothed at the edge.

exp(q.k/sqrt(d)) P(|q - k + tau g|_1 <= delta)     the product of two maps, draw by draw

The error of the mask's factor grows exponentially with d: for heads wider than 4 the mask is
exp(-|q - k|_1 / delta), which has Cauchy frequencies and takes any width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from linexport.models.attention_masks import visible
from linexport.models.softmax_calls import Call

LOCAL = "favor+*local"


def masked(call: Call, delta: float) -> Tensor:
    """Exactly masked softmax attention, (B, H, T, d_v); 0 for a query without a key so near."""
    repeats = call.query.shape[1] // call.key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (call.key, call.value))
    near = torch.cdist(call.query, key, p=1) <= delta
    if call.attn_mask is not None:
        seen = visible(call.attn_mask)
        assert seen is not None
        near = near & seen
    if call.is_causal:
        near = near.tril()
    scores = (call.query @ key.mT * call.factor).masked_fill(~near, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ value
