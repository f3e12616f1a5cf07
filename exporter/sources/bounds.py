"""The range that the values of an example keep to, where that is not by chance.

Values are bounded that all have one sign, such as decays, times and probabilities, and those that
are all between -1 and 1. Normal values are neither but by chance, which ``UNLIKELY`` bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from linexport.sources.loaded_model import LoadedModel

if TYPE_CHECKING:
    import torch

UNLIKELY = 1e-3
"""Probability with which values of no kind look as if they had one, at most."""

WITHIN_ONE = 0.6827
"""Share of normal values between -1 and 1."""


def bounds_of(example: torch.Tensor) -> tuple[float, float] | None:
    """Return the least and the largest of floating values that are bounded; None of others."""
    count = example.numel()
    if not example.is_floating_point() or not count or not bool(example.isfinite().all()):
        return None
    low, high = float(example.min()), float(example.max())
    one_sign = (low >= 0 or high <= 0) and 0.5 ** (count - 1) <= UNLIKELY
    small = max(-low, high) <= 1 and WITHIN_ONE**count <= UNLIKELY
    return (low, high) if low < high and (one_sign or small) else None


def bounds_by_name(loaded: LoadedModel, names: Sequence[str]) -> Mapping[str, tuple[float, float]]:
    """Return the bounds of the examples that have some.

    Args:
        loaded: a model; the example of a file in ONNX is none of its user.
        names: of its flattened inputs.
    """
    import torch

    from linexport.system.torch_internals.trees import pytree

    if loaded.graph is not None:
        return {}
    leaves = pytree.tree_leaves((loaded.args, loaded.kwargs))
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    found = {name: bounds_of(tensor) for name, tensor in zip(names, tensors, strict=False)}
    return {name: bounds for name, bounds in found.items() if bounds is not None}
