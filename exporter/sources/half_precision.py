"""Modules that compute in half precision, as a whole or in part, and the same in float32.

    model.half(), model.bfloat16()       weights, buffers and inputs
    x.half(), x.to(torch.bfloat16)       what the code of the module names
    torch.autocast("cpu", ...)           regions
    torch.autocast("cuda", ...)          regions that compute in float32 on a machine without a GPU

float16 stays float16 in the artifact. ONNX Runtime has no bfloat16 kernels for CPUs: a module that
uses it is converted in float32, as is one whose regions are of a GPU alone. All are compared with
the module as it was given, in its own precision, and with the same in float32: weights, buffers and
inputs widened, float32 where its code names half precision, and regions that do nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from linexport.sources.first_run import buffers_kept
from linexport.system.copies import copied
from linexport.system.torch_internals.exports import control_flow_as_it_is
from linexport.system.torch_internals.modules import change_tensors
from linexport.system.torch_internals.operators import OperatorMode, dtype_of
from linexport.system.torch_internals.trees import pytree
from linexport.system.untyped import Keywords, Positional, TorchCallable

HALVES = (torch.bfloat16, torch.float16)
"""Half precisions, the coarser one first."""

WIDE = torch.float32

METHODS = (torch.Tensor.bfloat16, torch.Tensor.half)

GPU, CPU = "cuda", "cpu"

SWITCHED_OFF = "_switched_off_without_gpu"
"""Attribute of regions of a GPU that torch switched off when they were made, for lack of one."""


@dataclass(frozen=True)
class AsGiven:
    """A module that computes in half precision, as it was given.

    Attributes:
        module: in eval mode.
        dtype: the coarsest half precision that it computes in.
        dtypes: those of its flattened example inputs; None of what is not a tensor.
        on_gpu: it does so on a GPU alone, in regions that are run on the CPU here.
    """

    module: torch.nn.Module
    dtype: torch.dtype
    dtypes: tuple[torch.dtype | None, ...]
    on_gpu: bool = False

    @property
    def is_kept(self) -> bool:
        """The artifact computes in this precision as well."""
        return self.dtype == torch.float16 and not self.on_gpu

    @property
    def name(self) -> str:
        """Name of the precision."""
        return str(self.dtype).removeprefix("torch.")

    def run(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        """Return the outputs of inputs in any precision.

        Raises:
            Exception: whatever the module raises.
        """
        leaves, structure = pytree.tree_flatten((args, kwargs))
        taken = [_typed(x, dtype) for x, dtype in zip(leaves, self.dtypes, strict=True)]
        args, kwargs = pytree.tree_unflatten(taken, structure)
        with torch.no_grad(), control_flow_as_it_is(), _GpuRegions(self.on_gpu):
            return self.module(*args, **kwargs)


def _typed(value: object, dtype: torch.dtype | None) -> object:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if floating and isinstance(value, torch.Tensor) else value


def as_given(
    module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> AsGiven | None:
    """Return a module as it was given, where it computes in half precision; None for any other.

    Args:
        module: in eval mode.
        args: its example inputs.
        kwargs: those by name.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    dtypes = tuple(x.dtype if isinstance(x, torch.Tensor) else None for x in leaves)
    for on_gpu in (False, True):
        seen, regions = _Seen(), _GpuRegions(on_gpu)
        try:
            plain = control_flow_as_it_is()
            with torch.no_grad(), plain, buffers_kept(module), regions, seen:
                module(*args, **kwargs)
        except Exception:  # tracing says what is wrong with these examples
            return None
        coarsest = next((dtype for dtype in HALVES if dtype in seen.dtypes), None)
        if coarsest is not None:
            return AsGiven(module, coarsest, dtypes, on_gpu)
        if not regions.entered:
            return None
    return None


def widened(
    module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object], AsGiven | None, tuple[str, ...]]:
    """Make a module that uses bfloat16 compute in float32, in place; leave any other as it is.

    Args:
        module: in eval mode.
        args: its example inputs.
        kwargs: those by name.

    Returns:
        The example inputs, none of them in bfloat16; the module as it was given, where it computes
        in half precision; and a warning where the artifact will not, with the distance of the two
        on the example inputs.
    """
    given = as_given(module, args, kwargs)
    if given is None or given.is_kept:
        return args, kwargs, given, ()
    with buffers_kept(module):
        before = given.run(args, kwargs)
    if not given.on_gpu:
        given = replace(given, module=copied(module))
        in_float32(module)
        args, kwargs = pytree.tree_map(wide_tensor, (args, kwargs))
    with torch.no_grad(), control_flow_as_it_is(), buffers_kept(module):
        after = module(*args, **kwargs)
    distance = max(map(_distance, pytree.tree_leaves(before), pytree.tree_leaves(after)))
    return args, kwargs, given, (said_of(given, distance),)


def said_of(given: AsGiven, distance: float | None) -> str:
    """Return the warning that an artifact is in float32 where the module it is made of is not.

    Args:
        given: that module.
        distance: of the two on the example inputs, relative to the largest output, where known.
    """
    cause = (
        f"in {given.name} on a GPU, in regions of torch.autocast"
        if given.on_gpu
        else f"in {given.name}, for which ONNX Runtime has no CPU kernels"
    )
    far = ""
    if distance is not None:
        far = (
            f" On the example inputs the two are {distance:.1e} apart, relative to the largest "
            "output."
        )
    return (
        f"The model computes {cause}: it is converted in float32, and compared in {given.name} and "
        f"in float32.{far}"
    )


class _Seen(OperatorMode):
    """Record which half precisions anything is computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(
        self,
        func: TorchCallable,
        types: object,
        args: Positional = (),
        kwargs: Keywords | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs, result))
        self.dtypes |= {x.dtype for x in leaves if isinstance(x, torch.Tensor)} & {*HALVES}
        return result


class _InFloat32(TorchFunctionMode):
    """A context in which float32 is taken where code names half precision."""

    def __torch_function__(
        self,
        func: TorchCallable,
        types: object,
        args: Positional = (),
        kwargs: Keywords | None = None,
    ) -> object:
        args, kwargs = pytree.tree_map(wide_type, (args, kwargs or {}))
        return (torch.Tensor.float if func in METHODS else func)(*args, **kwargs)


def wide_type(value: object) -> object:
    """Return float32 for a half precision; any other value as it is."""
    return WIDE if isinstance(value, torch.dtype) and value in HALVES else value


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """Let contexts that compute in half precision do nothing."""
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__

    def entering(context: Any) -> object:
        return context if dtype_of(context) in HALVES else enter(context)

    def leaving(context: Any, *error: Any) -> object:
        return None if dtype_of(context) in HALVES else leave(context, *error)

    with (
        mock.patch.object(torch.autocast, "__enter__", entering),
        mock.patch.object(torch.autocast, "__exit__", leaving),
    ):
        yield


@contextlib.contextmanager
def gpu_regions_noted() -> Iterator[None]:
    """Note the regions of a GPU that code makes before it runs, as a decorator of forward is.

    torch switches them off on a machine without a GPU, and they say no more that they were on.
    """
    begin = torch.autocast.__init__

    @functools.wraps(begin)
    def beginning(
        context: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        begin(context, device_type, dtype, enabled, cache_enabled)
        if enabled and device_type == GPU and not torch.cuda.is_available():
            setattr(context, SWITCHED_OFF, True)

    with mock.patch.object(torch.autocast, "__init__", beginning):
        yield


class _GpuRegions:
    """A context that notes regions of ``torch.autocast("cuda")`` on a machine without a GPU.

    Attributes:
        entered: there was one.

    Args:
        here: run them on the CPU, in the precision that they have. Of those that were made before,
            these are the ones of ``gpu_regions_noted``.
    """

    def __init__(self, here: bool) -> None:
        self.entered, self._here = False, here
        self._inside: list[torch.autocast] = []

    def __enter__(self) -> Self:
        begin, enter = torch.autocast.__init__, torch.autocast.__enter__
        leave = torch.autocast.__exit__

        def beginning(context: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            mine = device_type == GPU and not torch.cuda.is_available()
            self.entered |= mine
            if mine and self._here:
                if not args and kwargs.get("dtype") is None:
                    kwargs["dtype"] = torch.float16  # the default of a GPU
                device_type = CPU
            begin(context, device_type, *args, **kwargs)

        def entering(context: Any) -> object:
            if context.device != GPU or torch.cuda.is_available():
                return enter(context)
            self.entered = True
            region = context
            if self._here:
                on = hasattr(context, SWITCHED_OFF)
                region = torch.autocast(CPU, dtype=context.fast_dtype, enabled=on)
            self._inside.append(region)
            enter(region)
            return context

        def leaving(context: Any, *error: Any) -> object:
            made_before = context.device == GPU and not torch.cuda.is_available()
            return leave(self._inside.pop() if made_before else context, *error)

        self._patches = contextlib.ExitStack()
        for name, method in (("init", beginning), ("enter", entering), ("exit", leaving)):
            patch = mock.patch.object(torch.autocast, f"__{name}__", method)
            self._patches.enter_context(patch)
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.close()


def in_float32(module: torch.nn.Module) -> torch.nn.Module:
    """Widen the weights, in place, and run the forward of the module in ``_InFloat32``."""
    plain = type(module)

    @functools.wraps(plain.forward)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _InFloat32(), _without_autocast():
            return plain.forward(self, *args, **kwargs)

    # A class rather than an attribute, so that a deep copy runs with its own weights.
    own = {"forward": forward, "__module__": plain.__module__}
    module.__class__ = type(plain.__name__, (plain,), own)
    change_tensors(module, wide_tensor)
    return module


def wide_tensor(value: object) -> Any:
    """Return a tensor in half precision in float32; any other value as it is."""
    return value.to(WIDE) if isinstance(value, torch.Tensor) and value.dtype in HALVES else value


def _distance(before: Any, after: Any) -> float:
    if not isinstance(before, torch.Tensor) or not before.is_floating_point():
        return 0.0
    largest = float(after.abs().max()) or 1.0
    return float((before.double() - after.double()).abs().max()) / largest
