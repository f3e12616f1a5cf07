"""Weights described for people: NaN and infinite values, numbers of parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from linexport.errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch

_NAMED = 5


def non_finite_warnings(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, ...]:
    """One warning per tensor with NaN or Inf, and one more counting the tensors not named.

    Infinite values in buffers are left alone: masks of -inf are ordinary.

    Args:
        tensors: names and tensors, buffers being those that do not require grad nor are Parameters.
    """
    import torch

    found = []
    for name, tensor in tensors:
        if not tensor.is_floating_point() or tensor.is_meta:
            continue
        values = tensor.detach()
        if values.element_size() == 1:  # isnan is not defined for float8
            values = values.float()
        nan = int(torch.isnan(values).sum())
        inf = int(torch.isinf(values).sum()) if isinstance(tensor, torch.nn.Parameter) else 0
        if nan or inf:
            counts = [f"{count} {what}" for count, what in ((nan, "NaN"), (inf, "Inf")) if count]
            found.append(f"{name} has {' and '.join(counts)} of {values.numel()} values")
    if len(found) > _NAMED:
        found[_NAMED:] = [f"{len(found) - _NAMED} more weights have NaN or Inf values"]
    return tuple(found)


def check_finite(module: torch.nn.Module) -> None:
    """Refuse weights that no integers stand for.

    Raises:
        UnsupportedModelError: parameters are NaN or infinite, or buffers NaN.
    """
    found = non_finite_warnings(named_tensors(module))
    if found:
        raise UnsupportedModelError(
            f"{'; '.join(found)}: --weights int8, int4 and auto need finite ones. Correct them, or "
            "take the checkpoint from its author again; a mask belongs into a buffer."
        )


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
