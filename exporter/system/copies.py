"""Copies of modules, those too that keep what they computed.

PyTorch copies no tensor that autograd knows the origin of, and modules keep such tensors: the
weight of ``torch.nn.utils.weight_norm`` and ``spectral_norm``, a table made of a parameter, the
last map of attention for a picture. A copy of one has its values, and no origin.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch.overrides import TorchFunctionMode

from linexport.system.untyped import Keywords, Positional, TorchCallable


class _Detaching(TorchFunctionMode):
    """A context in which tensors are copied without their origin, where they have one."""

    def __torch_function__(
        self,
        func: TorchCallable,
        types: object,
        args: Positional = (),
        kwargs: Keywords | None = None,
    ) -> object:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            return memo.setdefault(id(tensor), tensor.detach().clone())
        return func(*args, **(kwargs or {}))


def copied(module: torch.nn.Module, memo: Mapping[int, object] | None = None) -> torch.nn.Module:
    """Return a deep copy of a module.

    Args:
        module: unchanged.
        memo: what stands for an object in the copy, by the object's ``id``.
    """
    with _Detaching():
        return copy.deepcopy(module, dict(memo or {}))
