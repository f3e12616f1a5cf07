"""A module that computes in bfloat16, in part or as a whole -> the same module in float32.

ONNX Runtime has no bfloat16 kernels for CPUs. Weights, buffers and inputs in bfloat16 become
float32, and where the code of the module names bfloat16, float32 is taken; ``torch.autocast`` to
bfloat16 does nothing. The two differ by the rounding that float32 does not need.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from linexport.sources.first_run import buffers_kept
from linexport.system.torch_internals.exports import control_flow_as_it_is
from linexport.system.torch_internals.modules import change_tensors
from linexport.system.torch_internals.operators import OperatorMode, dtype_of
from linexport.system.torch_internals.trees import pytree
from linexport.system.untyped import Keywords, Positional, TorchCallable

LOW, WIDE = torch.bfloat16, torch.float32


def widened(
    module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object], tuple[str, ...]]:
    """Make a module that uses bfloat16 compute in float32, in place; leave any other as it is.

    Args:
        module: in eval mode.
        args: its example inputs.
        kwargs: those by name.

    Returns:
        The example inputs, none of them in bfloat16, and a warning where something was changed,
        with the distance of the two on the example inputs.
    """
    seen = _Seen()
    try:
        with torch.no_grad(), control_flow_as_it_is(), buffers_kept(module), seen:
            before = module(*args, **kwargs)
    except Exception:  # tracing says what is wrong with these examples
        return args, kwargs, ()
    if not seen.low:
        return args, kwargs, ()
    _in_float32(module)
    args, kwargs = pytree.tree_map(_wide_tensor, (args, kwargs))
    with torch.no_grad(), control_flow_as_it_is(), buffers_kept(module):
        after = module(*args, **kwargs)
    distance = max(map(_distance, pytree.tree_leaves(before), pytree.tree_leaves(after)))
    return (
        args,
        kwargs,
        (
            "The model computes in bfloat16, for which ONNX Runtime has no CPU kernels: it is "
            "converted, and compared, in float32. On the example inputs the two are "
            f"{distance:.1e} apart, relative to the largest output.",
        ),
    )


class _Seen(OperatorMode):
    """Record whether anything is computed in bfloat16."""

    low = False

    def __torch_dispatch__(
        self,
        func: TorchCallable,
        types: object,
        args: Positional = (),
        kwargs: Keywords | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self.low = self.low or any(
            isinstance(leaf, torch.Tensor) and leaf.dtype == LOW
            for leaf in pytree.tree_leaves((args, kwargs, result))
        )
        return result


class _InFloat32(TorchFunctionMode):
    """A context in which float32 is taken where code names bfloat16."""

    def __torch_function__(
        self,
        func: TorchCallable,
        types: object,
        args: Positional = (),
        kwargs: Keywords | None = None,
    ) -> object:
        args, kwargs = pytree.tree_map(lambda x: WIDE if x is LOW else x, (args, kwargs or {}))
        return (torch.Tensor.float if func is torch.Tensor.bfloat16 else func)(*args, **kwargs)


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """Let contexts that compute in bfloat16 do nothing."""
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__

    def entering(context: Any) -> object:
        return context if _is_low(context) else enter(context)

    def leaving(context: Any, *error: Any) -> object:
        return None if _is_low(context) else leave(context, *error)

    with (
        mock.patch.object(torch.autocast, "__enter__", entering),
        mock.patch.object(torch.autocast, "__exit__", leaving),
    ):
        yield


def _is_low(context: Any) -> bool:
    return dtype_of(context) == LOW


def _in_float32(module: torch.nn.Module) -> None:
    """Widen the weights, and run the forward of the module in ``_InFloat32``."""
    plain = type(module)

    @functools.wraps(plain.forward)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _InFloat32(), _without_autocast():
            return plain.forward(self, *args, **kwargs)

    # A class rather than an attribute, so that a deep copy runs with its own weights.
    own = {"forward": forward, "__module__": plain.__module__}
    module.__class__ = type(plain.__name__, (plain,), own)
    change_tensors(module, _wide_tensor)


def _wide_tensor(value: object) -> Any:
    return value.to(WIDE) if isinstance(value, torch.Tensor) and value.dtype == LOW else value


def _distance(before: Any, after: Any) -> float:
    if not isinstance(before, torch.Tensor) or not before.is_floating_point():
        return 0.0
    largest = float(after.abs().max()) or 1.0
    return float((before.double() - after.double()).abs().max()) / largest
