"""Multi-head attention to a fitted static memory, as a layer.

    o_h = softmax(scale q_h K^_h^T + b_h) V^_h        q packed (B, T, H*d), o (B, T, H*d_v)

It is linear attention whose state never changes: S = V^, z = 1, phi(q) = softmax(K^ q + b).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linexport.errors import UsageError
from linexport.models.static_memory.pseudo_keys import PseudoMemory


class StaticMemory(nn.Module):
    """One fitted memory per head, frozen, in float32.

    Raises:
        UsageError: no heads, or heads of different sizes.
    """

    keys: Tensor
    bias: Tensor
    values: Tensor

    def __init__(self, heads: Sequence[PseudoMemory]) -> None:
        super().__init__()
        sizes = {(h.keys.shape, h.values.shape) for h in heads}
        if len(sizes) != 1:
            found = ", ".join(f"keys {k} values {v}" for k, v in sorted(sizes)) or "none"
            raise UsageError(f"A static memory needs heads of one size; found {found}.")
        # The scale goes into the keys: one product less for every query.
        for name, parts in (
            ("keys", [h.scale * h.keys for h in heads]),
            ("bias", [h.bias for h in heads]),
            ("values", [h.values for h in heads]),
        ):
            self.register_buffer(name, torch.from_numpy(np.stack(parts)).float())

    def forward(self, query: Tensor) -> Tensor:
        """(B, T, H*d_v) of (B, T, H*d)."""
        heads = self.keys.shape[0]
        q = query.unflatten(-1, (heads, self.keys.shape[2])).transpose(1, 2)
        return self.attend(q).transpose(1, 2).flatten(2)

    def attend(self, query: Tensor) -> Tensor:
        """(B, H, T, d_v) of (B, H, T, d)."""
        # PyTorch is fast where batches are equal and the mask has four dimensions; in ONNX products
        # broadcast, and copies for every row would take longer than they do.
        rows = 1 if torch.compiler.is_exporting() else query.shape[0]
        return F.scaled_dot_product_attention(
            query,
            self.keys.expand(rows, -1, -1, -1),
            self.values.expand(rows, -1, -1, -1),
            attn_mask=self.bias[None, :, None],
            scale=1.0,
        )
