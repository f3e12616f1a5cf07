"""The scan in log space of mingru-scans, which begins with a number -> ``LinearAttention``, gated.

h_t = a_t h_{t-1} + b_t        is        h_t - h_0 = a_t (h_{t-1} - h_0) + b_t - (1 - a_t) h_0
"""

from __future__ import annotations

import torch
from torch import Tensor

from linexport.patches.heads_first import linear_attention
from linexport.patches.packages import Function


def _scan(log_coeffs: Tensor, log_values: Tensor) -> Tensor:
    """Stands in for ``parallel_scan_log`` of (B, T, D), and (B, T + 1, D) that begins with h_0."""
    first, added = log_values[:, :1].exp(), log_values[:, 1:].exp()
    value = (added + torch.expm1(log_coeffs) * first).transpose(1, 2)[..., None]
    one = torch.ones_like(value)
    found = linear_attention(one, one, value, log_coeffs.transpose(1, 2))
    return found[..., 0].transpose(1, 2) + first


FUNCTIONS = (Function("mingru.min_gru", "parallel_scan_log", _scan, "mingru-scans 0.2.0"),)
