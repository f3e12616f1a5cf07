"""Modules of packages on PyPI, as their authors wrote them, most of them linear in the tokens.

Each takes (B, T, 16), or tokens in multiples of ``unit``. None of the packages is a dependency. A
module registers itself by being imported.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from torch import Tensor, nn

WIDTH = 16


@dataclass(frozen=True)
class ThirdParty:
    """A module of a package.

    Attributes:
        package: the name on PyPI.
        imports: the name it is imported by.
        build: makes the module.
        linear: whether it can be computed with a state of fixed size.
        causal: whether an output depends on no later token, without which nothing can stream.
        unit: lengths are multiples of it.
    """

    package: str
    imports: str
    build: Callable[[], nn.Module]
    linear: bool = True
    causal: bool = True
    unit: int = 1

    @property
    def installed(self) -> bool:
        """Whether the package can be imported."""
        return importlib.util.find_spec(self.imports) is not None


MODULES: dict[str, ThirdParty] = {}


def module(
    package: str, imports: str, *, linear: bool = True, causal: bool = True, unit: int = 1
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Register a function that makes a module."""

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        MODULES[build.__name__] = ThirdParty(package, imports, build, linear, causal, unit)
        return build

    return register


class First(nn.Module):
    """The first output of a module that takes its input once, or as query, key and value."""

    def __init__(self, inner: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.inner, self.times = inner, times

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(*[x] * self.times)
        return found if isinstance(found, Tensor) else found[0]


class Single(nn.Module):
    """A module that computes a part in complex64 always: its own reference is in float32."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def double(self) -> Single:
        return self

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x.float())
        return found.to(x.dtype)


class Projected(nn.Module):
    """A function of projections of the input, of these widths."""

    def __init__(self, function: Callable[..., Tensor], *widths: int) -> None:
        super().__init__()
        self.function, self.widths = function, widths
        self.project = nn.Linear(WIDTH, sum(widths))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(*self.project(x).split(self.widths, -1))


@contextmanager
def empty_modules(*names: str) -> Iterator[ModuleType]:
    """Let imports find empty modules of these names; yields the last."""
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.modules.update({name: ModuleType(name) for name in names})
    try:
        yield sys.modules[names[-1]]
    finally:
        for name, found in before.items():
            del sys.modules[name]
            if found is not None:
                sys.modules[name] = found


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)
