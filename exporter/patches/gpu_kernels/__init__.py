"""Kernels of GPU libraries in plain PyTorch: what an original calls on a machine without a GPU.

fla, mamba_ssm, causal_conv1d and extensions for selective scans compute in kernels that need a GPU.
One file for each kind of kernel, found by scanning here: a module with ``KERNELS``. A kernel is
known by its name in its package, as its module changes from release to release. One function
stands in for it in two roles:

    the original  a loop over tokens, compared with the library's own reference where it has one
    the trace     within ``as_ops``, where a recurrence is linexport's op

It takes over on the CPU alone. It does so until the process ends, since nothing else can run there,
and the original runs in many stages: on its example, for sizes, for the comparison, for times.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
import pkgutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata
from types import MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from linexport.errors import UnsupportedModelError
from linexport.manifest.records import KernelRecord
from linexport.system.torch_internals.trees import pytree
from linexport.system.untyped import Keywords, LibraryObject, Positional, TorchCallable

__all__ = [
    "GpuKernel",
    "compare",
    "functions",
    "install",
    "is_of_library",
    "is_traced",
    "kernels",
    "recorded",
    "run",
    "traced",
]

log = logging.getLogger(__name__)

MARK = "__linexport_kernel__"
"""Attribute of what stands in for a kernel: the kernel."""

DISTRIBUTIONS = {"fla": "flash-linear-attention", "mamba_ssm": "mamba-ssm"}
"""Names of packages that their installed distributions do not have."""

SHOWN = 40
"""Characters of a value that an error quotes."""


@dataclass(frozen=True)
class GpuKernel:
    """A function of a package.

    Attributes:
        packages: that have it under one of its names.
        names: functions that compute the same.
        function: stands in for them. Its parameters have the names of theirs.
        formula: what it computes, in one line.
        reference: function of the library in plain PyTorch, by its place in the package, such as
            "modules.l2norm.l2_norm_ref"; "" where it has none of these parameters.
        instead: advice where nothing stands in for it, so that a call is refused; "" where
            the function does.
        is_recorded: whether the manifest names it; it need not where the library, too, computes it
            in PyTorch.
    """

    packages: tuple[str, ...]
    names: tuple[str, ...]
    function: TorchCallable
    formula: str
    reference: str = ""
    instead: str = ""
    is_recorded: bool = True


MANNER = frozenset(
    (
        "backend",
        "checkpoint_level",
        "checkpoint_lvl",
        "chunk_indices",
        "chunk_size",
        "cu_seqlens_cpu",
        "disable_recompute",
        "max_num_seqs",
        "output_dtype",
        "residual_in_fp32",
        "return_dropout_mask",
        "safe_gate",
        "use_graph",
    )
)
"""Parameters that say how a kernel computes, not what."""

_traced: ContextVar[bool] = ContextVar("traced", default=False)
_seen: ContextVar[dict[str, KernelRecord] | None] = ContextVar("seen", default=None)
_current: ContextVar[str] = ContextVar("current", default="")


@cache
def kernels() -> tuple[GpuKernel, ...]:
    """Every kernel: ``KERNELS`` of the modules of this folder."""
    names = sorted(found.name for found in pkgutil.iter_modules(__path__))
    modules = (importlib.import_module(f"{__name__}.{name}") for name in names)
    return tuple(kernel for module in modules for kernel in getattr(module, "KERNELS", ()))


@cache
def functions(package: str) -> dict[str, TorchCallable]:
    """Return functions that a package without kernels has in their place, by their names.

    Their references are among them: code imports these beside the kernels.
    """
    return {
        name: _function(kernel, f"{package}.{name}")
        for kernel in kernels()
        if package in kernel.packages
        for name in (*kernel.names, kernel.reference.rpartition(".")[2])
        if name
    }


def _function(kernel: GpuKernel, place: str) -> TorchCallable:
    """Return a function that is called as a kernel is, and recorded."""

    @functools.wraps(kernel.function)
    def call(*args: object, **kwargs: object) -> Any:
        return run(kernel, place, None, args, kwargs)

    setattr(call, MARK, kernel)
    return call


def install(model: nn.Module) -> None:
    """Put stand-ins in the place of kernels that are imported, and of those that a model holds."""
    found: dict[object, TorchCallable] = {}
    imported = _modules({package for kernel in kernels() for package in kernel.packages})
    for kernel in kernels():
        for module in (m for package in kernel.packages for m in imported.get(package, ())):
            for name in kernel.names:
                value = vars(module).get(name)
                if _key(value) not in found and _is_own(value, kernel.packages):
                    found[_key(value)] = _stand_in(kernel, value, name)
    if found:
        _replace(found, model)


def is_of_library(file: str) -> bool:
    """Return whether a file is of a package that has kernels."""
    packages = {package for kernel in kernels() for package in kernel.packages}
    folders = (f for p in packages for f in getattr(sys.modules.get(p), "__path__", ()))
    return file.startswith(tuple(f"{folder}{os.sep}" for folder in folders))


@contextmanager
def recorded() -> Iterator[dict[str, KernelRecord]]:
    """Record the kernels that are stood in for by what runs within, by their names."""
    records: dict[str, KernelRecord] = {}
    token = _seen.set(records)
    try:
        yield records
    finally:
        _seen.reset(token)


@contextmanager
def traced() -> Iterator[None]:
    """Let recurrences be linexport's ops, so that a trace has them."""
    token = _traced.set(True)
    try:
        yield
    finally:
        _traced.reset(token)


def is_traced() -> bool:
    """Return whether recurrences are to be linexport's ops."""
    return _traced.get()


def compare(library: str, given: Keywords, found: object) -> None:
    """Record how far results are from those of the library's own reference, on the first call.

    Args:
        library: the reference, package.module.function.
        given: its arguments.
        found: what stands in for it gives.
    """
    records, name = _seen.get(), _current.get()
    if records is None or is_traced() or name not in records or records[name].error is not None:
        return
    reference = _find(library)
    given = {} if reference is None else _taken(reference, given)
    error = _difference(reference, given, found) if given else None
    if error is not None:
        records[name] = replace(records[name], reference=library, error=error)


def _find(name: str) -> LibraryObject:
    """Return a library's own function by package.module.name; None where there is none."""
    module, _, last = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), last, None)
    except Exception:  # whatever a package without a GPU raises
        return None
    return None if hasattr(found, MARK) else found


def _taken(reference: LibraryObject, given: Keywords) -> Keywords:
    """Return arguments that a reference takes; none where it lacks one that says something."""
    names = inspect.signature(reference).parameters
    lacks = [n for n, x in given.items() if n not in names and not (x is None or x is False)]
    return {} if lacks else {name: value for name, value in given.items() if name in names}


def _difference(reference: LibraryObject, given: Keywords, found: object) -> float | None:
    """Return how far a result is from a reference's, relative to its largest value.

    None where the reference fails or has another layout: it is a function of the library's tests.
    """
    try:
        expected, *_ = _tensors(reference(**given))
    except Exception:  # whatever it raises for arguments that it does not take
        return None
    ours, *_ = _tensors(found)
    if expected.shape != ours.shape:
        return None
    scale = expected.double().abs().max().clamp(min=1e-30)
    return float((expected.double() - ours.double()).abs().max() / scale)


def _tensors(values: object) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


def _modules(packages: Collection[str]) -> dict[str, list[ModuleType]]:
    """Return the modules of some packages that are imported, by package."""
    found: dict[str, list[ModuleType]] = {}
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        if package in packages and isinstance(module, ModuleType):
            found.setdefault(package, []).append(module)
    return found


def _is_own(value: LibraryObject, packages: Iterable[str]) -> bool:
    """Return whether a value is a function that one of some packages defines."""
    if value is None or isinstance(value, type) or not callable(value) or hasattr(value, MARK):
        return False
    return _home(value).partition(".")[0] in packages


def _home(value: LibraryObject) -> str:
    """Return the module that defines a function; of ``Function.apply``, that of its class."""
    return str(getattr(getattr(value, "__self__", value), "__module__", ""))


def _stand_in(kernel: GpuKernel, original: LibraryObject, name: str) -> TorchCallable:
    """Return a function that calls a kernel's stand-in on the CPU, and the kernel elsewhere."""
    place, signature = f"{_home(original)}.{name}", _signature(original)

    @functools.wraps(original)
    def call(*args: object, **kwargs: object) -> Any:
        tensors = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        if any(x.device.type not in ("cpu", "meta") for x in tensors):
            return original(*args, **kwargs)
        return run(kernel, place, signature, args, kwargs)

    setattr(call, MARK, kernel)
    log.info("%s is stood in for: %s", place, kernel.formula)
    return call


def _signature(function: LibraryObject) -> inspect.Signature | None:
    """Return a function's signature; None of one that takes any, as ``Function.apply`` does."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    kinds = {p.kind for p in found.parameters.values()}
    return None if inspect.Parameter.VAR_POSITIONAL in kinds else found


def run(
    kernel: GpuKernel,
    place: str,
    original: inspect.Signature | None,
    args: Positional,
    kwargs: Keywords,
) -> Any:
    """Call what stands in for a kernel, with the arguments that the kernel is called with.

    Args:
        kernel: it.
        place: where its package has it.
        original: its signature; None to take arguments as the stand-in has them.
        args: positional arguments.
        kwargs: others.

    Raises:
        UnsupportedModelError: one of them is not known here.
    """
    if kernel.instead:
        raise UnsupportedModelError(
            f"{place} computes {kernel.formula}, of which linexport has no form without a GPU. "
            f"{kernel.instead}."
        )
    own = inspect.signature(kernel.function)
    other = {n: x for n, x in kwargs.items() if original is None and n not in own.parameters}
    kwargs = {n: x for n, x in kwargs.items() if n not in other}
    given = other | _by_name(own if original is None else original, args, kwargs)
    known = {name: given.pop(name) for name in own.parameters if name in given}
    for name, value in given.items():
        if name not in MANNER and not _is_default(value, original, name):
            raise UnsupportedModelError(
                f"{place} is called with {name}={_shown(value)}. Without a GPU linexport computes "
                f"{kernel.formula}, which has no {name}. Leave it out."
            )
    token = _current.set(place)
    try:
        _record(kernel, place)
        found = kernel.function(**known)
        if kernel.reference:
            compare(f"{place.partition('.')[0]}.{kernel.reference}", known, found)
        return found
    finally:
        _current.reset(token)


def _by_name(signature: inspect.Signature, args: Positional, kwargs: Keywords) -> Keywords:
    """Return the arguments of a call by the names of a function's parameters."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    rest = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), None)
    return given | given.pop(rest, {}) if rest else given


def _is_default(value: object, original: inspect.Signature | None, name: str) -> bool:
    """Return whether an argument says nothing, as if it were left out."""
    if value is None or value is False:
        return True
    parameter = None if original is None else original.parameters.get(name)
    plain = isinstance(value, bool | int | float | str | tuple)
    return parameter is not None and plain and value == parameter.default


def _shown(value: object) -> str:
    text = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _record(kernel: GpuKernel, place: str) -> None:
    records = _seen.get()
    if kernel.is_recorded and records is not None and place not in records:
        function = kernel.function
        records[place] = KernelRecord(
            name=place,
            package=_release(place.partition(".")[0]),
            stand_in=f"{function.__module__}.{function.__qualname__}",
            formula=kernel.formula,
        )


def _release(package: str) -> str:
    """Return a package's distribution and version; the package alone where none is installed."""
    name = DISTRIBUTIONS.get(package, package)
    try:
        return f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return package


def _key(value: object) -> object:
    """Return what tells a function from others; methods are made anew by each look-up and copy."""
    return value if isinstance(value, MethodType) else id(value)


def _replace(found: Mapping[object, TorchCallable], model: nn.Module) -> None:
    """Put functions in the place of others, wherever modules and a model hold them."""
    for holder in [*filter(None, list(sys.modules.values())), *model.modules()]:
        own = getattr(holder, "__dict__", None) or {}
        for key, value in list(own.items()):
            if type(value) is dict:  # a table of activations, by name
                named = {name: found.get(_key(one)) for name, one in list(value.items())}
                value.update({name: new for name, new in named.items() if new is not None})
            elif (new := found.get(_key(value))) is not None:
                setattr(holder, key, new)
