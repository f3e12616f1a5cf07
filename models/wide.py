"""Modules whose buffers stay in float32 where the rest of a model goes to half precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

HALF = (torch.float16, torch.bfloat16)


class WideBuffers(nn.Module):
    """Its own buffers, not those of its children, are moved and converted, but never narrowed."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> WideBuffers:
        kept = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = self._buffers[name]
            if before is not None and after is not None and after.dtype in HALF:
                self._buffers[name] = before.to(after.device)
        return self
