"""Tensors in safetensors files: names, types and sizes from the headers, values when read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linexport.errors import UnsupportedModelError
from linexport.sources.files import refuse

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Header:
    """Type, as safetensors names it, and sizes of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]


class StoredTensors(Mapping[str, Header]):
    """All tensors of the weight files of a folder."""

    def __init__(self, folder: Path, files: Sequence[Path]) -> None:
        self.folder, self.files = folder, tuple(files)

    @cached_property
    def _open(self) -> tuple[Any, ...]:
        from safetensors import safe_open

        return tuple(safe_open(path, framework="pt") for path in self.files)

    @cached_property
    def _place(self) -> dict[str, Any]:
        return {name: file for file in self._open for name in file.keys()}  # noqa: SIM118

    @cached_property
    def _headers(self) -> dict[str, Header]:
        slices = ((name, file.get_slice(name)) for name, file in self._place.items())
        return {n: Header(s.get_dtype(), tuple(s.get_shape())) for n, s in slices}

    def __getitem__(self, name: str) -> Header:
        return self._headers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers)

    def __len__(self) -> int:
        return len(self._headers)

    def read(self, name: str, row: int | None = None) -> Tensor:
        """Return the values of a tensor as they are stored, or of one entry of its first size."""
        if row is not None:
            entry: Tensor = self._place[name].get_slice(name)[row]
            return entry
        found: Tensor = self._place[name].get_tensor(name)
        return found

    def stems(self, suffix: str) -> Iterator[str]:
        """Return what is before ``suffix`` in the names that end with it."""
        return (name.removesuffix(suffix) for name in list(self) if name.endswith(suffix))

    def need(self, name: str, whose: str) -> Header:
        """Return the header of a tensor that another one needs.

        Raises:
            UnsupportedModelError: it is missing.
        """
        if name not in self:
            raise self.wrong(f"{whose} without {name}, so its numbers are not known")
        return self[name]

    def expect(self, name: str, *shapes: Iterable[int]) -> None:
        """Check the sizes of a tensor.

        Raises:
            UnsupportedModelError: they are none of ``shapes``.
        """
        known = [tuple(shape) for shape in shapes]
        if self[name].shape not in known:
            expected = " or ".join(map(str, known))
            raise self.wrong(f"{name} has shape {self[name].shape}, expected {expected}")

    def group_size(self, scales: str, count: int, groups: int, *stated: object) -> int:
        """Return how many of ``count`` rows or columns share a scale.

        Args:
            scales: their name.
            count: of rows or columns.
            groups: that the scales have.
            stated: sizes that the configuration gives, of which one that fits is taken; without
                any, groups are of one size.

        Raises:
            UnsupportedModelError: none fits.
        """
        sizes = [s for s in stated if isinstance(s, int) and s > 0]
        if not sizes and groups and count % groups == 0:
            sizes = [count // groups]
        for size in sizes:
            if -(-count // size) == groups:
                return size
        raise self.wrong(f"{scales} has {groups} groups, into which {count} values do not divide")

    def wrong(self, found: str) -> UnsupportedModelError:
        """Return the refusal of weights whose parts do not fit each other."""
        return refuse(
            self.folder, found, "download it again, or take the checkpoint it was quantised from"
        )
