"""Modules whose buffers stay in float32 where the rest of a model goes to half precision."""

from __future__ import annotations

from collections.abc import Callable

import torch

from linexport.system.torch_internals.modules import Change, ConvertibleModule

HALF = (torch.float16, torch.bfloat16)


class WideBuffers(ConvertibleModule):
    """Its own buffers, not those of its children, are moved and converted, but never narrowed."""

    def converted(self, change: Change, plain: Callable[[], object]) -> None:
        """Convert all, and put buffers back that were narrowed."""
        kept = dict(self.named_buffers(recurse=False))
        plain()
        for name, before in kept.items():
            after = self.get_buffer(name)
            if after.dtype in HALF:
                setattr(self, name, before.to(after.device))
