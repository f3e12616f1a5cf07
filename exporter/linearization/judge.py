"""Errors of linear forms on the inputs that the attention they replace has in the original.

error = |o^ - o| / |o|      over all queries that are there, o softmax attention's output

Beside it stands the error of attending to all keys alike, o^ the mean of the values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from linexport.errors import ParityError
from linexport.linearization.calibration import Rows
from linexport.linearization.error_bins import ErrorBins, position_bins, sharpness_bins
from linexport.linearization.find_softmax import Site, run
from linexport.linearization.forms import KernelAttention
from linexport.linearization.locality import masked
from linexport.models import attention_masks
from linexport.models.softmax_calls import Attending, Call


@dataclass
class ErrorSums:
    """Sums over the data for one form of one site.

    Attributes:
        difference: of squared differences.
        size: of squares of the true output.
        uniform: of squared differences if all keys weighed the same.
        not_positive: denominators at or below zero, of maps whose kernel can be negative.
        denominators: how many there are.
        by_row: of each row, squared differences of the form and of all keys alike.
        by_position: the same by the position of the query, where it was requested.
        by_sharpness: and by the share of the keys that it attends to.
    """

    difference: float = 0.0
    size: float = 0.0
    uniform: float = 0.0
    not_positive: int = 0
    denominators: int = 0
    by_row: list[tuple[float, float]] = field(default_factory=list)
    by_position: ErrorBins = field(default_factory=ErrorBins)
    by_sharpness: ErrorBins = field(default_factory=ErrorBins)

    @property
    def error(self) -> float:
        """Infinite where an output was."""
        if not math.isfinite(self.difference):
            return math.inf
        return math.sqrt(self.difference / self.size) if self.size else math.inf

    @property
    def uniform_error(self) -> float:
        """Error of attending to all keys alike, which a form has to beat to be of any use."""
        return math.sqrt(self.uniform / self.size) if self.size else math.inf

    @property
    def margin(self) -> float | None:
        """See ``AttentionRow``."""
        return standard_errors(self.by_row)

    @property
    def vanishes(self) -> bool:
        """The denominator does, or the output is not finite."""
        return self.not_positive > 0 or not math.isfinite(self.difference)


Forms = Mapping[int, Sequence[nn.Module]]


def judge_forms(
    module: nn.Module,
    batches: Iterable[Rows],
    forms: Forms,
    locality: float | None = None,
    binned: bool = False,
    found: dict[int, list[ErrorSums]] | None = None,
) -> dict[int, list[ErrorSums]]:
    """Every form of every site, by its index; the module itself goes on with softmax attention.

    Args:
        module: with softmax attention.
        batches: its arguments.
        forms: by the index of their sites.
        locality: judge against softmax attention to the keys within that L1 distance.
        binned: bin errors by position and sharpness, too.
        found: sums of earlier batches, which these are added to.
    """
    found = found or {index: [ErrorSums() for _ in ones] for index, ones in forms.items()}

    def answer(index: int, call: Call) -> Tensor:
        true = call.softmax()
        if forms.get(index):
            expected = true if locality is None else masked(call, locality)
            judged = _Judged(call, expected, binned)
            for form, sums in zip(forms[index], found[index], strict=True):
                judged.add(sums, form)
        return true

    with torch.no_grad():
        for batch in batches:
            with Attending(answer):
                run(module, batch)
    return found


def standard_errors(by_row: Sequence[tuple[float, float]]) -> float | None:
    """(1 - r) / s for the ratio r = sum_i f_i / sum_i a_i of both squared errors over rows i.

    s^2 = n / (n - 1) sum_i (f_i - r a_i)^2 / (sum_i a_i)^2 is the variance of that ratio. None of
    fewer than two rows, or where no row differs.
    """
    form, alike = torch.tensor(by_row, dtype=torch.float64).reshape(-1, 2).mT
    ratio = form.sum() / alike.sum()
    spread = (form - ratio * alike).std()
    if len(form) < 2 or not bool(spread.isfinite()) or not float(spread):
        return None
    return float((1 - ratio) * alike.sum() / (spread * len(form) ** 0.5))


def uniform(call: Call) -> Tensor:
    """The mean of the values that each query may see."""
    return replace(call, query=torch.zeros_like(call.query)).softmax()


def refuse_vanishing(site: Site, form: KernelAttention, judged: ErrorSums) -> None:
    """Raise where a denominator vanishes on the data.

    Raises:
        ParityError: names the layer and its map.
    """
    if not judged.vanishes:
        return
    what = (
        f"the denominator, an estimate of a positive sum, is zero or negative for "
        f"{judged.not_positive} of {judged.denominators} queries"
        if judged.not_positive
        else "the output is NaN or infinite"
    )
    raise ParityError(
        f"{site.name} with the feature map {form.feature_map.kind!r} "
        f"(M = {form.feature_map.features}): on the calibration data {what}. "
        f"{form.feature_map.failure} Choose a map with a positive kernel, such as favor+ or "
        "taylor2, or more features."
    )


class _Judged:
    """One call with its true output, which forms are added up against."""

    def __init__(self, call: Call, true: Tensor, binned: bool) -> None:
        self.call, self.true = call, true
        self.there = _asked(call).expand(*true.shape[:-1], 1)[..., 0]
        self.size, self.alike = self._squares(true), self._squares(uniform(call) - true)
        self.bins: tuple[Any, Any] | None = None
        if binned:
            bounds, at = position_bins(true.shape[2])
            self.bins = (bounds, at.expand(true.shape[:-1])), sharpness_bins(call)

    def add(self, sums: ErrorSums, form: nn.Module) -> None:
        difference = self._squares(form(self.call) - self.true)
        rows = (x.flatten(1).sum(1).tolist() for x in (difference, self.alike))
        sums.by_row += zip(*rows, strict=True)
        sums.uniform += float(self.alike.sum())
        sums.difference += float(difference.sum())
        sums.size += float(self.size.sum())
        if self.bins is not None:
            squares = torch.stack([difference, self.size, self.alike])
            for kept, (bounds, at) in zip(
                (sums.by_position, sums.by_sharpness), self.bins, strict=True
            ):
                kept.add(bounds, at, self.there, squares)
        if isinstance(form, KernelAttention) and not form.feature_map.kernel_positive:
            denominators = form.denominators(self.call).mT
            kept_ones = denominators[self.there.expand_as(denominators)]
            sums.not_positive += int((kept_ones <= 0).sum())
            sums.denominators += kept_ones.numel()

    def _squares(self, x: Tensor) -> Tensor:
        """Squared length of each query's row, (B, H, T); 0 for those that are not there."""
        return torch.where(self.there, x.double().square().sum(-1), 0.0)


def _asked(call: Call) -> Tensor:
    """True for queries that are there: of self-attention, those that are not masked as keys."""
    length, keys = call.query.shape[2], call.key.shape[2]
    if call.attn_mask is None or length != keys:
        return call.query.new_ones(1, 1, 1, 1, dtype=torch.bool)
    seen = attention_masks.key_mask(call.attn_mask, call.query.shape[0], keys)
    return seen[:, None, :, None]
