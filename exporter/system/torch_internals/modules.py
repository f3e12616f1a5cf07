"""Conversion of torch's modules to another device or dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn

from linexport.system.torch_internals import Internal
from linexport.system.untyped import TorchInternal

APPLY = Internal(
    "torch.nn",
    "Module._apply",
    "converts what a module keeps by other means than its weights, and keeps buffers wide",
)
APPLY.need()

Change = Callable[[Tensor], Tensor]


class ConvertibleModule(nn.Module):
    """A module with a hook on ``to``, ``double``, ``half`` and the like."""

    def converted(self, change: Change, plain: Callable[[], object]) -> None:
        """Convert the module.

        Args:
            change: of a tensor.
            plain: converts the weights and buffers as torch does.
        """
        plain()

    def _apply(self, fn: TorchInternal, recurse: bool = True) -> Self:
        apply = super()._apply
        self.converted(fn, lambda: apply(fn, recurse))
        return self


def change_tensors(module: nn.Module, change: Change) -> None:
    """Convert all weights and buffers of a module by a function."""
    module._apply(change)
