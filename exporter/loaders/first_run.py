"""A module run as it is, on the inputs that it comes with, before anything else is done with it.

Buffers that it writes have their values again afterwards: the module is as the user gave it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._higher_order_ops import utils
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from linexport.errors import UnsupportedModelError
from linexport.loaders.callables import user_frame
from linexport.loaders.files import first_line

LISTED = 6
"""Inputs that are described in an error."""


def run_once(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
) -> Any:
    """Return what a module gives for its own example.

    Args:
        module: in evaluation mode.
        args: example inputs.
        kwargs: those by name.
        name: what the user calls the model.

    Raises:
        UnsupportedModelError: it fails; with the line of the user's code.
    """
    try:
        with torch.no_grad(), uncompiled(), buffers_kept(module):
            return module(*args, **kwargs)
    except Exception as error:
        example = described(module, args, kwargs)
        raise failure(error, name, f"its example inputs, {example}") from error


def failure(error: Exception, name: str, inputs: str) -> UnsupportedModelError:
    """Return the error of a model that fails as it is, with the line of the user's code.

    Args:
        error: what it raised.
        name: what the user calls the model.
        inputs: what it was run on.
    """
    said, frame = first_line(error).rstrip("."), user_frame(error.__traceback__)
    place = f" at {frame.filename}:{frame.lineno} ({frame.line})" if frame else ""
    return UnsupportedModelError(
        f"{name}: the model itself fails{place}: {said}. It was run on {inputs}. Correct the model "
        "or its inputs: module(*args, **kwargs) must run."
    )


@contextmanager
def buffers_kept(module: torch.nn.Module) -> Iterator[None]:
    """Give the buffers of a module the values again that they had before."""
    saved = [
        (part, key, buffer, None if buffer is None else buffer.detach().clone())
        for part in module.modules()
        for key, buffer in part._buffers.items()
        if not is_lazy(buffer)
    ]
    try:
        yield
    finally:
        for part, key, buffer, values in saved:
            if buffer is not None and not _same(buffer, values):
                with torch.no_grad():
                    buffer.copy_(values)
            part._buffers[key] = buffer


@contextmanager
def uncompiled() -> Iterator[None]:
    """``torch.cond``, ``while_loop`` and ``scan`` run as they are; torch would compile them first.

    torch 2.13.0 cannot do that once a module was exported in the same process.
    """

    def call(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
        return fn(*args, **(kwargs or {}))

    with mock.patch.object(utils, "_hop_compile_and_call", call):
        yield


def runs(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a module takes these inputs."""
    try:
        with torch.no_grad(), uncompiled(), buffers_kept(module):
            module(*args, **kwargs)
    except Exception:
        return False
    return True


def described(module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the tensors among inputs in words: "ids (2, 16) int64 from 100 to 199"."""
    try:
        given = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # that it takes other ones may be what is wrong
        given = {**{f"argument {n}": x for n, x in enumerate(args)}, **kwargs}
    found = [
        f"{name} {_tensor(leaf)}"
        for name, value in given.items()
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, torch.Tensor)
    ]
    more = f" and {len(found) - LISTED} more tensors" if len(found) > LISTED else ""
    return ", ".join(found[:LISTED]) + more


def _tensor(value: torch.Tensor) -> str:
    text = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    whole = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    return f"{text} from {int(value.min())} to {int(value.max())}" if whole and len(value) else text


def _same(buffer: torch.Tensor, values: torch.Tensor | None) -> bool:
    return values is not None and torch.equal(buffer, values)
