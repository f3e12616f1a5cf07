"""The user's own score of a model, before and after it was changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from linexport.errors import UsageError
from linexport.manifest.proof import MetricRecord
from linexport.sources.callables import find_callable, user_code

Evaluate = Callable[[Any], Any]


@dataclass(frozen=True)
class Metric:
    """The user's own score of a model: a module, or an opened artifact.

    Attributes:
        name: of the function.
        evaluate: gives a number for a model; it may be a tensor of one element.
        lower_is_better: a loss, not a score.
    """

    name: str
    evaluate: Evaluate
    lower_is_better: bool = False

    def of(self, model: object) -> float:
        """The score of one model.

        Raises:
            UsageError: the function raises, or gives something else than a finite number.
        """
        with torch.no_grad(), user_code(f"{self.name} failed"):
            found = self.evaluate(model)
        try:
            value = float(found)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError(
                f"{self.name} returned {type(found).__name__}; expected a number."
            ) from None
        if not math.isfinite(value):
            raise UsageError(
                f"{self.name} returned {value} for a {type(model).__name__}; expected a finite "
                "number."
            )
        return value

    def drop(self, before: float, after: float) -> float:
        """By how much it got worse; negative where it got better."""
        return after - before if self.lower_is_better else before - after

    def compared(self, before: object, after: object) -> MetricRecord:
        """The scores of two models, and by how much the second is worse."""
        scores = self.of(before), self.of(after)
        return MetricRecord(self.name, *scores, self.drop(*scores), self.lower_is_better)


def find_metric(name: str, lower_is_better: bool) -> Metric:
    """The function ``package.module:evaluate``.

    Raises:
        UsageError: there is none.
    """
    purpose = "a function of a model that returns a number"
    return Metric(name, find_callable(name, purpose), lower_is_better)


def as_metric(
    evaluate: Metric | Evaluate | str | None, lower_is_better: bool = False
) -> Metric | None:
    """The metric that a caller means by itself, a function, or ``package.module:evaluate``.

    Raises:
        UsageError: no function has that name.
    """
    if evaluate is None or isinstance(evaluate, Metric):
        return evaluate
    if isinstance(evaluate, str):
        return find_metric(evaluate, lower_is_better)
    return Metric(getattr(evaluate, "__name__", "the metric"), evaluate, lower_is_better)


def check_drop(evaluate: object, max_drop: float | None) -> None:
    """Refuse a limit of a score that nothing measures, or that is not a number.

    Raises:
        UsageError: see above.
    """
    if max_drop is None:
        return
    if evaluate is None:
        raise UsageError("--max-drop needs --evaluate, the score that may drop.")
    if not 0 <= max_drop < float("inf"):
        raise UsageError(f"--max-drop is {max_drop}; expected a number that is not negative.")
