"""The table of strangers' layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

WIDTH = 16


@dataclass(frozen=True)
class Stranger:
    """A layer, and what must become of it.

    Attributes:
        build: makes the module.
        kind: as ``tests.support.converted`` says it.
        unit: lengths are multiples of it.
        linear: whether it can be computed with a state of fixed size.
    """

    build: Callable[[], nn.Module]
    kind: str
    unit: int = 1
    linear: bool = True


STRANGERS: dict[str, Stranger] = {}


def stranger(
    kind: str, unit: int = 1, linear: bool = True
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a module class."""

    def register(module: type[nn.Module]) -> type[nn.Module]:
        STRANGERS[module.__name__] = Stranger(module, kind, unit, linear)
        return module

    return register
