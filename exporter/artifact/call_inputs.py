"""The inputs of an artifact: taken by position or name, and checked before the model sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from linexport.artifact.finite import non_finite_rows
from linexport.errors import NonFiniteError, UsageError
from linexport.graph.dims import followers
from linexport.graph.states import State, rows_dim
from linexport.manifest import Manifest
from linexport.manifest.records import InputRecord
from linexport.system.untyped import ArrayLike

Arrays = dict[str, np.ndarray]
Input = np.ndarray | Mapping[str, np.ndarray]
Range = tuple[int, int]


class CallInputs:
    """The inputs that a caller gives, those that hold states excluded.

    Args:
        manifest: of the artifact.
        states: by the names of their inputs.
        ranges: half-open ranges of integers, by input: rows of the tables they index.
        array: makes an array of what a caller gives.
    """

    def __init__(
        self,
        manifest: Manifest,
        states: Mapping[str, State],
        ranges: Mapping[str, Range],
        array: Callable[[ArrayLike], np.ndarray] = np.asarray,
    ) -> None:
        self._inputs = [i for i in manifest.inputs if i.name not in states]
        self._dims, self._ranges, self._array = manifest.dims, ranges, array
        self._batch = rows_dim(states.values(), manifest.dims)

    def bind(self, args: Sequence[Input], named: Mapping[str, np.ndarray]) -> tuple[Arrays, int]:
        """Return every input by name, those left out at their defaults, and the batch size.

        Raises:
            UsageError: an input is missing, unknown, of the wrong dtype or shape, without
                elements, or an index out of its table.
        """
        names = [i.name for i in self._inputs]
        if len(args) == 1 and isinstance(args[0], Mapping):
            named, args = {**args[0], **named}, ()
        if len(args) > len(names):
            raise UsageError(f"Found {len(args)} inputs; expected {len(names)}: {names}.")
        feeds = {**dict(zip(names, args, strict=False)), **named}
        optional = {i.name for i in self._inputs if i.default is not None}
        if not set(names) - optional <= set(feeds) <= set(names):
            raise UsageError(f"Found the inputs {sorted(feeds)}; expected {names}.")
        sizes: dict[str, int] = {}
        bound = {
            i.name: self._check(i, self._array(feeds[i.name]), sizes)
            for i in self._inputs
            if i.name in feeds
        }
        self._check_related(sizes)
        for i in self._inputs:
            if i.name not in bound:
                shape = [d if isinstance(d, int) else sizes[str(d)] for d in i.shape]
                bound[i.name] = np.full(shape, i.default, i.dtype)
        batch = self._batch
        return bound, batch if isinstance(batch, int) else sizes[str(batch)]

    def _check(self, record: InputRecord, value: np.ndarray, sizes: dict[str, int]) -> np.ndarray:
        name, shape = record.name, record.shape
        if value.dtype != record.dtype:
            if not np.can_cast(value.dtype, record.dtype, "same_kind"):
                raise UsageError(f"{name} has dtype {value.dtype}; expected {record.dtype}.")
            value = np.asarray(value).astype(record.dtype)
        fits = value.ndim == len(shape) and all(
            found == expected if isinstance(expected, int) else True
            for found, expected in zip(value.shape, shape, strict=True)
        )
        if not fits:
            raise UsageError(f"{name} has shape {value.shape}; expected {tuple(shape)}.")
        for found, dim in zip(value.shape, shape, strict=True):
            if isinstance(dim, str) and dim in self._dims:
                self._check_size(name, dim, found, sizes)
        if name in self._ranges:
            _check_range(name, value, *self._ranges[name])
        return value

    def _check_related(self, sizes: dict[str, int]) -> None:
        """Compare sizes with those that they follow from; add those of inputs left out."""
        for dim, (number, root) in followers(self._dims).items():
            if (
                root in sizes
                and sizes.setdefault(dim, number * sizes[root]) != number * sizes[root]
            ):
                raise UsageError(
                    f"Found {dim} {sizes[dim]} and {root} {sizes[root]}; expected "
                    f"{number * sizes[root]}, {number} times as much."
                )

    def _check_size(self, name: str, dim: str, found: int, sizes: dict[str, int]) -> None:
        limits = self._dims[dim]
        if sizes.setdefault(dim, found) != found:
            raise UsageError(f"{name} has {dim} {found}; another input has {sizes[dim]}.")
        if found == 0 and limits.min != 0:
            raise UsageError(f"{name} has {dim} 0; expected at least 1.")
        if found % limits.multiple:
            raise UsageError(
                f"{name} has {dim} {found}; the model takes multiples of {limits.multiple}."
            )
        if limits.max is not None and found > limits.max:
            raise UsageError(f"{name} has {dim} {found}; the model takes at most {limits.max}.")


def _check_range(name: str, value: np.ndarray, low: int, high: int) -> None:
    value = np.asarray(value)
    if value.size and (value.min() < low or value.max() >= high):
        raise UsageError(
            f"{name} has values from {value.min()} to {value.max()}; the model's table takes "
            f"{low} to {high - 1}."
        )


def check_finite(feeds: Mapping[str, np.ndarray], ignored: frozenset[int]) -> None:
    """Refuse NaN and infinity, except in rows that are ignored.

    Raises:
        NonFiniteError: names the first input that has any, and its rows.
    """
    for name, values in feeds.items():
        rows = [int(row) for row in non_finite_rows(values) if row not in ignored]
        if rows:
            raise NonFiniteError(
                f"The input {name} has NaN or infinity in {count_rows(rows)}. No row was advanced: "
                "call again with finite values.",
                (name,),
                tuple(rows),
            )


def count_rows(rows: Sequence[int]) -> str:
    """Return "row 3", or "rows 1, 3, 4"; the first few of many."""
    shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
    return f"row {shown}" if len(rows) == 1 else f"rows {shown}"
