"""Shapes of op inputs as far as a graph knows them, and the comparisons op checks are made of.

A dimension is an int, a symbol (str), a symbol of PyTorch (SymInt) or None where nothing is known.
Comparisons accept what is not known and raise OpError, naming what was found and what was expected,
for what is wrong. Of symbols of PyTorch they make it known that they are equal.
"""

from __future__ import annotations

from collections.abc import Sequence

from linexport.errors import OpError

Dim = int | str | None
PartialShape = Sequence[Dim]


def rank(name: str, shape: PartialShape, expected: int) -> None:
    """``shape`` has ``expected`` dimensions."""
    if len(shape) != expected:
        raise OpError(f"{name} has shape {tuple(shape)}; expected {expected} dimensions.")


def same_dim(name: str, what: str, found: Dim, expected: Dim) -> None:
    """``found`` equals ``expected``, unless one of them is unknown."""
    if any(size is None or isinstance(size, str) for size in (found, expected)):
        return
    if isinstance(found, int) and isinstance(expected, int):
        if found != expected:
            raise OpError(f"{name} has {what} {found}; expected {expected}.")
        return
    import torch

    # At least one is a symbol of a trace in which the two may be separate symbols.
    torch._check(found == expected)


def same_sequence(name: str, shape: PartialShape, batch: Dim, length: Dim, dims: int = 3) -> None:
    """``shape`` has ``dims`` dimensions, of which the first are ``batch`` and ``length``."""
    rank(name, shape, dims)
    same_dim(name, "batch", shape[0], batch)
    same_dim(name, "length", shape[1], length)


def static_width(name: str, shape: PartialShape) -> int:
    """The last of three dimensions, which must be known."""
    rank(name, shape, 3)
    if not isinstance(shape[-1], int):
        raise OpError(f"{name} has an unknown width in {tuple(shape)}; heads need a fixed one.")
    return shape[-1]


def width_per_head(name: str, shape: PartialShape, heads: int) -> int:
    """The last of three dimensions divided by the heads packed into it."""
    width = static_width(name, shape)
    if width < heads or width % heads:
        raise OpError(f"{name} has width {width}; expected a multiple of its {heads} heads.")
    return width // heads


def one_of(name: str, found: int, expected: tuple[int, int]) -> None:
    """A width is one of two."""
    if found not in expected:
        raise OpError(f"{name} has width {found}; expected {expected[0]} or {expected[1]}.")
