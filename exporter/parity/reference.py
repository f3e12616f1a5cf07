"""The original module as reference: float32 as it is, and float64 where it allows that."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from linexport.loaders.model import LoadedModel
from linexport.models import functional

Inputs = tuple[tuple[object, ...], dict[str, object]]


class Reference:
    """A module run on drawn inputs.

    In another precision it is a copy, whose weights are there only while it runs.

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
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        if dtype != torch.float32:
            self.module = self._copied(loaded.module)

    def __call__(self, inputs: Inputs) -> list[np.ndarray]:
        """Flattened outputs.

        Raises:
            Exception: whatever the module raises.
        """
        args, kwargs = pytree.tree_map(self._convert, inputs)
        with torch.no_grad(), self._filled(), functional.watch_denominators() as seen:
            outputs = self.module(*args, **kwargs)
        # min of Python takes a NaN only where it comes first.
        self.denominator = float(torch.stack([x.double() for x in seen]).min()) if seen else None
        leaves = [x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor)]
        return [x.numpy() for x in leaves]

    def _copied(self, module: torch.nn.Module) -> torch.nn.Module:
        """A copy in this precision, as far as the module has it, whose weights are empty."""
        empty = {id(w): _empty(w) for w in _weights(module).values()}
        made = copy.deepcopy(module, empty).to(self.dtype)
        mine = _weights(made)
        self._pairs = [(mine[name], weight) for name, weight in _weights(module).items()]
        return made

    @contextmanager
    def _filled(self) -> Iterator[None]:
        """With the weights of the original, in one block: many small ones leave a heap in holes."""
        block = torch.empty(sum(w.numel() for _, w in self._pairs), dtype=self.dtype)
        places = block.split([w.numel() for _, w in self._pairs])
        try:
            for (mine, weight), place in zip(self._pairs, places, strict=True):
                values = place.view(weight.shape).copy_(weight.detach())
                mine.data = values.to(mine.dtype)
            yield
        finally:
            for mine, _ in self._pairs:
                mine.data = mine.data.new_empty(0)

    def _convert(self, leaf: object) -> object:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.to(self.dtype)
        return leaf


def _weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Floating parameters and buffers by name; what has several names occurs as often."""
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {name: weight for name, weight in named if weight.is_floating_point()}


def _empty(weight: torch.Tensor) -> torch.Tensor:
    values = weight.detach().new_empty(0)
    if isinstance(weight, torch.nn.Parameter):
        return torch.nn.Parameter(values, requires_grad=False)
    return values


def feeds(inputs: Inputs, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The tensors of drawn inputs by the names of the graph's inputs."""
    leaves: list[Any] = [x for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)]
    return {name: leaf.numpy() for name, leaf in zip(names, leaves, strict=True)}
