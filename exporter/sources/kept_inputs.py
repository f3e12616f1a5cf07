"""Modules whose forward changes tensors that it is given, such as a cache that a step updates.

Every call works on copies of its inputs: what the caller holds is what it was, in each of the calls
that trace the module and compare it.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from linexport.system.torch_internals.trees import pytree


def copies(given: Any) -> Any:
    """Return nested values with copies of their tensors."""
    return pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, given)


def write_counts_of(given: object) -> list[int]:
    """Return the number of writes to each tensor of nested values."""
    return [write_count(x) for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]


def write_count(value: Tensor) -> int:
    """Return the number of writes to a tensor; 0 of one that does not count them."""
    return 0 if value.is_inference() else value._version


def keep_inputs(module: nn.Module) -> None:
    """Make every call of a module work on copies of its inputs, in place."""
    plain = type(module)

    @functools.wraps(plain.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = copies((args, kwargs))
        return plain.forward(self, *args, **kwargs)

    # A class rather than an attribute, so that a deep copy runs with its own weights.
    own = {"forward": forward, "__module__": plain.__module__}
    module.__class__ = type(plain.__name__, (plain,), own)
