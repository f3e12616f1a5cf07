"""Operators of torch's dispatcher: their schemas and kernels, and contexts that see every call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from linexport.system.torch_internals import Internal
from linexport.system.untyped import Keywords, TorchInternal

MODE = Internal(
    "torch.utils._python_dispatch",
    "TorchDispatchMode",
    "changes what operators give while an original is run",
)
SCHEMA = Internal(
    "torch._ops", "OpOverload", "reads the names, defaults and aliases of an operator's arguments"
)
HAS_KERNEL = Internal(
    "torch._C",
    "_dispatch_has_kernel",
    "tells operators of the dispatcher from TorchScript's functions, some of which write files",
)
KEYS = Internal(
    "torch._C", "DispatchKey", "tells operators that others compute from those with kernels"
)
MODE.need()
SCHEMA.need()

from torch._ops import OpOverload as Overload  # noqa: E402 - after the errors that name the release
from torch.utils._python_dispatch import TorchDispatchMode as OperatorMode  # noqa: E402

__all__ = [
    "OperatorMode",
    "Overload",
    "arguments",
    "functional",
    "has_kernel",
    "is_composite",
    "makes_values",
    "name_of",
    "writes",
]

COMPOSITE = KEYS.need().CompositeImplicitAutograd


def schema(operator: object) -> TorchInternal:
    """Return the schema of an operator; None of another function."""
    return getattr(operator, "_schema", None)


def name_of(operator: object) -> str:
    """Return aten::mul of aten.mul.Tensor."""
    return str(schema(operator).name)


def short_name(function: object) -> str:
    """Return mul of aten.mul.Tensor, and the name of another function."""
    return str(getattr(function, "_opname", getattr(function, "__name__", function)))


def argument_names(operator: object) -> list[str] | None:
    """Return the names of an operator's arguments, in order; None of another function."""
    found = schema(operator)
    return None if found is None else [a.name for a in found.arguments]


def arguments(operator: object, args: Sequence[object], kwargs: Mapping[str, object]) -> Keywords:
    """Return the arguments of a call by name, with the defaults of those left out."""
    declared = schema(operator).arguments
    given = {a.name: a.default_value for a in declared if a.has_default_value()}
    return {**given, **dict(zip((a.name for a in declared), args, strict=False)), **kwargs}


def makes_values(operator: object) -> bool:
    """Return whether an operator makes values; a view has those of another tensor."""
    aliases = [result.alias_info for result in schema(operator).returns]
    return all(alias is None or alias.is_write for alias in aliases)


def writes(operator: object) -> bool:
    """Return whether an operator writes into one of its arguments."""
    return bool(schema(operator).is_mutable)


def functional(operator: object) -> Overload | None:
    """Return the operator that gives what another one writes into its first argument, if any."""
    named = schema(operator)
    namespace, name = named.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    written = [i for i, a in enumerate(named.arguments) if a.alias_info and a.alias_info.is_write]
    found = getattr(packet, named.overload_name or "default", None)
    return found if name.endswith("_") and written == [0] else None


def is_composite(operator: TorchInternal) -> bool:
    """Return whether an operator is computed by others, whatever the device."""
    return bool(operator.has_kernel_for_dispatch_key(COMPOSITE))


def has_kernel(operator: object) -> bool:
    """Return whether a function is an operator of the dispatcher.

    Raises:
        EnvironmentProblemError: this torch does not say.
    """
    return isinstance(operator, Overload) and bool(HAS_KERNEL.need()(operator.name()))


def dtype_of(autocast: torch.autocast) -> torch.dtype | None:
    """Return the dtype that a context computes in; None where it is switched off."""
    return autocast.fast_dtype if getattr(autocast, "_enabled", True) else None
