"""Code that names a GPU, on a machine without one: its tensors are made and left on the CPU.

Functions of torch are others while such code runs, and only then: while it builds its model, and in
each call of the model's ``forward``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from linexport.system.untyped import TorchCallable

MAKERS = ("arange", "empty", "full", "ones", "tensor", "zeros")
"""Functions of torch that make a tensor on the device that they are given."""

_lock = threading.Lock()
_before: dict[tuple[object, str], object] = {}
_depth = 0


@contextmanager
def tensors_on_the_cpu() -> Iterator[None]:
    """Leave tensors on the CPU where code names a GPU; contexts may be within another."""
    global _depth
    with _lock:
        if not _depth:
            _replace()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if not _depth:
                _restore()


def keep_on_the_cpu(model: nn.Module) -> None:
    """Let each call of a model's ``forward`` leave tensors on the CPU."""
    kind = type(model)

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with tensors_on_the_cpu():
            return kind.forward(self, *args, **kwargs)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    model.__class__ = type(kind.__name__, (kind,), {**names, "forward": forward})


def _replace() -> None:
    def cuda(self: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        return self

    others: list[tuple[object, str, object]] = [(torch.Tensor, "cuda", cuda)]
    others += [(torch, name, _on_cpu(getattr(torch, name))) for name in MAKERS]
    for holder, name, other in others:
        _before[holder, name] = getattr(holder, name)
        setattr(holder, name, other)


def _restore() -> None:
    for (holder, name), original in _before.items():
        setattr(holder, name, original)
    _before.clear()


def _on_cpu(make: TorchCallable) -> TorchCallable:
    """Return a function that makes tensors on the CPU where it is given a GPU."""

    @functools.wraps(make)
    def made(*args: object, **kwargs: object) -> Any:
        if torch.device(str(kwargs.get("device") or "cpu")).type == "cuda":
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made
