"""The axis of the tokens in inputs and outputs: pieces of a sequence cut and joined along it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from linexport.artifact.call_inputs import Arrays
from linexport.errors import UsageError
from linexport.graph.states import State, rows_dim
from linexport.manifest import Manifest


class TokenAxis:
    """Where the tokens are in every input and output of a model, states excluded.

    Attributes:
        dim: name of the dimension.

    Raises:
        UsageError: no input has a dynamic axis besides the batch.
    """

    def __init__(self, manifest: Manifest, states: Sequence[State]) -> None:
        held = {name for s in states for name in (s.past, s.present)}
        batch = rows_dim(states, manifest.dims)
        records = [r for r in (*manifest.inputs, *manifest.outputs) if r.name not in held]
        given = {i.name for i in manifest.inputs}
        dims = [d for r in records if r.name in given for d in r.shape if isinstance(d, str)]
        dim = next((d for d in dims if d != batch), None)
        if dim is None:
            raise UsageError(f"{manifest.artifact} has no input with a dynamic axis of tokens.")
        self.dim = dim
        self._axes = {r.name: r.shape.index(dim) for r in records if dim in r.shape}

    def length(self, feeds: Mapping[str, np.ndarray]) -> int:
        """Return the number of tokens of a piece."""
        return next(v.shape[self._axes[n]] for n, v in feeds.items() if n in self._axes)

    def cut(self, values: Mapping[str, np.ndarray], start: int, end: int | None = None) -> Arrays:
        """Return tokens from ``start`` to ``end``; values without a token axis are not cut."""
        return {
            name: array[(slice(None),) * self._axes[name] + (slice(start, end),)]
            if name in self._axes
            else array
            for name, array in values.items()
        }

    def join(self, pieces: Sequence[Mapping[str, np.ndarray]]) -> Arrays:
        """Return the piece of all; what has no tokens is that of the last."""
        return {
            name: np.concatenate([piece[name] for piece in pieces], self._axes[name])
            if name in self._axes
            else array
            for name, array in pieces[-1].items()
        }
