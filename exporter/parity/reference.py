"""The original module as reference: float32 as it is, and float64 where it allows that."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from linexport.loaders.model import LoadedModel
from linexport.models import functional

Inputs = tuple[tuple[object, ...], dict[str, object]]


class Reference:
    """A module run on drawn inputs.

    Attributes:
        denominator: smallest |denominator| of normalised linear attention in the last run, NaN if
            one was; None where none was computed by ``linexport.models``.

    Args:
        loaded: the original.
        dtype: computed in; floating inputs are converted to it.
    """

    def __init__(self, loaded: LoadedModel, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.name = str(dtype).removeprefix("torch.")
        self.module = loaded.module
        self.denominator: float | None = None
        if dtype != torch.float32:
            self.module = copy.deepcopy(loaded.module).to(dtype)

    def __call__(self, inputs: Inputs) -> list[np.ndarray]:
        """Flattened outputs.

        Raises:
            Exception: whatever the module raises.
        """
        args, kwargs = pytree.tree_map(self._convert, inputs)
        with torch.no_grad(), functional.watch_denominators() as seen:
            outputs = self.module(*args, **kwargs)
        # min of Python takes a NaN only where it comes first.
        self.denominator = float(torch.stack([x.double() for x in seen]).min()) if seen else None
        leaves = [x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor)]
        return [x.numpy() for x in leaves]

    def _convert(self, leaf: object) -> object:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.to(self.dtype)
        return leaf


def feeds(inputs: Inputs, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The tensors of drawn inputs by the names of the graph's inputs."""
    leaves: list[Any] = [x for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)]
    return {name: leaf.numpy() for name, leaf in zip(names, leaves, strict=True)}
