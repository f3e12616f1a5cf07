"""Package ``triton`` for machines that it is not made for, so that libraries of kernels import.

fla and mamba_ssm define their kernels when they are imported. Those are never launched here: other
functions stand in for what launches them. Hence any name of the package is a value that can be
called and decorated with, and a kernel is a value that says its name where it is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from linexport.errors import UnsupportedModelError

NAME = "triton"
VERSION = "3.3.0"
"""Release that libraries take the package for: the oldest that fla recommends."""


class TritonKernel:
    """A kernel that cannot be launched.

    Args:
        function: it, in Triton's language.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self.fn = function
        self.__name__, self.__module__ = function.__name__, function.__module__
        self.configs: Sequence[LaunchConfig] = ()

    def __getattr__(self, name: str) -> type[TritonName]:
        """Return a fact about a kernel that is not launched, such as names of its arguments."""
        return _name(name)

    def __getitem__(self, grid: object) -> NoReturn:
        """Refuse a launch on a grid."""
        raise self._refusal()

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse a call, as Triton does outside of kernels."""
        raise self._refusal()

    def _refusal(self) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.__module__}.{self.__name__} is a Triton kernel, which needs a GPU and has no "
            "form in PyTorch here. Use a layer that linexport's page on GPU libraries lists as one "
            "that converts."
        )


class _Names(type):
    """Metaclass of ``TritonName``: others derive from that, and values may be of its kind."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a kernel where one is decorated or wrapped, else this name."""
        first: Any = args[0] if args else None
        if isinstance(first, TritonKernel):
            return first
        is_decorator = len(args) == 1 and not kwargs and callable(first)
        return TritonKernel(first) if is_decorator and not isinstance(first, _Names) else cls

    def __getattr__(cls, name: str) -> type[TritonName]:
        """Return a name of a name."""
        return _name(name)


class TritonName(metaclass=_Names):
    """A name of the package: a decorator, a type of the language or a set of options."""


class LaunchConfig:
    """Options of a launch, which libraries choose among when they define a kernel.

    Args:
        kwargs: values of a kernel's parameters.
        num_warps: warps of a block.
        num_stages: stages of a loop's pipeline.
        options: others.
    """

    def __init__(
        self,
        kwargs: Mapping[str, object],
        num_warps: int = 4,
        num_stages: int = 3,
        **options: object,
    ) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages
        self.__dict__.update(options)


def autotune(
    configs: Sequence[LaunchConfig], *_args: object, **_options: object
) -> Callable[[Any], TritonKernel]:
    """Return a decorator of kernels, which keeps the options that they are tuned over."""

    def decorate(function: Any) -> TritonKernel:
        kernel = function if isinstance(function, TritonKernel) else TritonKernel(function)
        kernel.configs = configs
        return kernel

    return decorate


class _NoDriver:
    """``triton.runtime.driver`` on a machine without a GPU."""

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError("0 active drivers: this machine has no GPU that Triton knows")


def _ceiling(x: int, y: int) -> int:
    return -(-x // y)


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def content(module: str) -> Mapping[str, object]:
    """Return the names of a module of the package; any other is a ``TritonName``."""
    own: dict[str, object] = {"__getattr__": _name}
    if module == NAME:
        own |= {
            "__version__": VERSION,
            "Config": LaunchConfig,
            "autotune": autotune,
            "cdiv": _ceiling,
            "next_power_of_2": _power_of_2,
        }
    if module == f"{NAME}.runtime":
        own |= {"driver": _NoDriver()}
    return own


def _name(name: str) -> type[TritonName]:
    """Return a name that is looked up; none of those that Python itself looks for."""
    if name.startswith("__"):
        raise AttributeError(name)
    return TritonName
