"""Names for values of other libraries, whose types these do not state or change between releases.

A type checker looks at none of them: the name says what a value is, and why it has no type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

LibraryObject: TypeAlias = Any
"""A module, cache or config of a library that is installed in one of many releases."""

TorchInternal: TypeAlias = Any
"""Value of a module of torch that is not public, or that torch does not annotate."""

TorchCallable: TypeAlias = Callable[..., Any]
"""A function or operator of torch, as hooks and dispatch modes get it."""

Positional: TypeAlias = tuple[Any, ...]
"""Positional arguments of a model or of an operator: tensors, numbers and nested ones."""

Keywords: TypeAlias = dict[str, Any]
"""Positional by keyword of a model or of an operator."""

DynamicShapes: TypeAlias = Any
"""The dynamic sizes of a model's inputs, nested as they are, as ``torch.export`` takes them."""

ArrayLike: TypeAlias = Any
"""An array of NumPy, or one in the memory of a device: see ``targets.runtime.device_array``."""
