"""The user's own score of a module, before and after."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from linexport.errors import UsageError
from linexport.loaders.callables import find_callable, user_code

Evaluate = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Metric:
    """The user's own score of a module.

    Attributes:
        name: of the function.
        evaluate: gives a number for a module; it may be a tensor of one element.
        lower_is_better: a loss, not a score.
    """

    name: str
    evaluate: Evaluate
    lower_is_better: bool = False

    def of(self, module: nn.Module) -> float:
        """The score of one module.

        Raises:
            UsageError: the function raises, or gives something else than a finite number.
        """
        with torch.no_grad(), user_code(f"{self.name} failed"):
            found = self.evaluate(module)
        try:
            value = float(found)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(
                f"{self.name} returned {type(found).__name__}; expected a number."
            ) from None
        if not math.isfinite(value):
            raise UsageError(
                f"{self.name} returned {value} for a {type(module).__name__}; expected a finite "
                "number."
            )
        return value

    def drop(self, before: float, after: float) -> float:
        """By how much it got worse; negative where it got better."""
        return after - before if self.lower_is_better else before - after


def find_metric(name: str, lower_is_better: bool) -> Metric:
    """The function ``package.module:evaluate``.

    Raises:
        UsageError: there is none.
    """
    wanted = "a function of a module that returns a number"
    return Metric(name, find_callable(name, wanted), lower_is_better)
