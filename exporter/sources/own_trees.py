"""Classes of a model's author that its forward takes or returns: dataclasses of tensors.

torch.export takes apart lists, tuples, dicts and classes that are registered with it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from linexport.errors import UnsupportedModelError
from linexport.system.torch_internals.trees import pytree

LEAVES = (Tensor, bool, int, float, str, torch.dtype, torch.device)
"""Types of what torch.export takes as it is, besides None."""


def register_dataclasses(value: object) -> None:
    """Register the dataclasses among values, and those in their fields, with torch."""
    for leaf in pytree.tree_leaves(value):
        kind = type(leaf)
        is_own = kind.__module__.partition(".")[0] != "torch"
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type) and is_own:
            torch.export.register_dataclass(kind)
            register_dataclasses(leaf)


def check_outputs(outputs: object, name: str) -> None:
    """Register the dataclasses among outputs, and check that nothing else hides tensors.

    Args:
        outputs: of a module's forward.
        name: what the user calls the model.

    Raises:
        UnsupportedModelError: an output is of another class.
    """
    register_dataclasses(outputs)
    for leaf in pytree.tree_leaves(outputs):
        if leaf is not None and not isinstance(leaf, LEAVES):
            raise UnsupportedModelError(
                f"{name}: forward returns a {type(leaf).__name__}, of which torch.export cannot "
                "see the tensors. Return tensors, or lists, tuples, dicts or dataclasses of them; "
                "or register the class with torch.utils._pytree.register_pytree_node."
            )
