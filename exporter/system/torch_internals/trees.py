"""Flatten inputs and outputs as torch.export does: lists, dicts, registered classes."""

from __future__ import annotations

from linexport.system.torch_internals import Internal

TREES = Internal(
    "torch.utils._pytree",
    "tree_flatten",
    "flattens inputs in the order of torch.export",
)
TREES.need()

from torch.utils import _pytree as pytree  # noqa: E402 - after the error that names the release

__all__ = ["pytree"]
