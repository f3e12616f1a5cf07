"""Weights that are NaN or infinite, and the number of parameters for people."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from linexport.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch

_NAMED = 5

AT_ONCE = 2**22
"""Values of a weight that are looked at together."""


def check_finite(tensors: Iterable[tuple[str, torch.Tensor]], name: str) -> None:
    """Refuse weights that are NaN or infinite: outputs that are NaN equal any others.

    Infinite values in buffers are left alone: masks of -inf are ordinary.

    Args:
        tensors: names and tensors, buffers being those that are no Parameters.
        name: what the user calls the model.

    Raises:
        UnsupportedModelError: parameters are NaN or infinite, or buffers NaN.
    """
    found = list(_non_finite(tensors))
    if found:
        more = [f"{len(found) - _NAMED} more weights"] if len(found) > _NAMED else []
        raise UnsupportedModelError(
            f"{name}: {'; '.join([*found[:_NAMED], *more])}. Expected finite weights, as nothing "
            "can be compared with outputs that are NaN. Correct them, or take the checkpoint from "
            "its author again; a mask belongs into a buffer."
        )


def _non_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
    import torch

    for name, tensor in tensors:
        if not tensor.is_floating_point() or tensor.is_meta:
            continue
        nan = inf = 0
        for values in _parts(tensor.detach()):
            if values.element_size() == 1:  # isnan is not defined for float8
                values = values.float()
            nan += int(torch.isnan(values).sum())
            inf += int(torch.isinf(values).sum()) if isinstance(tensor, torch.nn.Parameter) else 0
        if nan or inf:
            counts = [f"{count} {what}" for count, what in ((nan, "NaN"), (inf, "Inf")) if count]
            yield f"{name} has {' and '.join(counts)} of {tensor.numel()} values"


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the rows of a tensor in parts of ``AT_ONCE`` values, as tests of them take memory."""
    if tensor.dim() == 0 or not tensor.numel():
        return [tensor]
    return tensor.split(max(1, AT_ONCE * len(tensor) // tensor.numel()))


def mismatches(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]
) -> list[str]:
    """Return what differs between the weights of a module and those of a file, by name."""
    return [
        *(f"{name} is missing" for name in expected if name not in found),
        *(f"{name} is not in the model" for name in found if name not in expected),
        *(
            f"{name} has shape {tuple(found[name].shape)}, expected {tuple(tensor.shape)}"
            for name, tensor in expected.items()
            if name in found and found[name].shape != tensor.shape
        ),
        *(
            f"{name} has the type {_dtype(found[name])}, expected {_dtype(tensor)}"
            for name, tensor in expected.items()
            if name in found and _family(found[name]) != _family(tensor)
        ),
    ]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _family(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Return what a copy between types keeps the same: real or complex, floating or not."""
    return tensor.is_complex(), tensor.is_floating_point()


def weights_digest(module: torch.nn.Module) -> str:
    """Return the SHA-256 of the names and values of all weights of a module."""
    import torch
    from torch.nn.parameter import is_lazy

    found = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        if not isinstance(value, torch.Tensor) or value.is_meta or is_lazy(value):
            continue
        found.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        found.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def named_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a module with their names."""
    return [*module.named_parameters(), *module.named_buffers()]


def parameter_summary(name: str, module: torch.nn.Module) -> str:
    """One line for people: "LanguageModel, 0.4 M parameters"."""
    count = sum(parameter.numel() for parameter in module.parameters())
    for scale, unit in ((10**9, " G"), (10**6, " M"), (10**3, " k")):
        if count >= scale / 10 and count >= 1000:
            return f"{name}, {count / scale:.1f}{unit} parameters"
    return f"{name}, {count} parameters"
