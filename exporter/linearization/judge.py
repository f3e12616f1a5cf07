"""Errors of linear forms on the inputs that the attention they replace has in the original.

error = |o^ - o| / |o|      over all queries that are there, o softmax attention's output
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from linexport.errors import ParityError
from linexport.linearization import masks
from linexport.linearization.calibration import Rows
from linexport.linearization.find_softmax import Site, run
from linexport.linearization.forms import KernelAttention
from linexport.linearization.locality import masked
from linexport.linearization.softmax_calls import Attending, Call


@dataclass
class ErrorSums:
    """Sums over the data for one form of one site.

    Attributes:
        difference: of squared differences.
        size: of squares of the true output.
        uniform: of squared differences if all keys weighed the same.
        not_positive: denominators at or below zero, of maps whose kernel can be negative.
        denominators: how many there are.
    """

    difference: float = 0.0
    size: float = 0.0
    uniform: float = 0.0
    not_positive: int = 0
    denominators: int = 0

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
    def vanishes(self) -> bool:
        """The denominator does, or the output is not finite."""
        return self.not_positive > 0 or not math.isfinite(self.difference)


Forms = Mapping[int, Sequence[nn.Module]]


def judge_forms(
    module: nn.Module, batches: Iterable[Rows], forms: Forms, locality: float | None = None
) -> dict[int, list[ErrorSums]]:
    """Every form of every site, by its index; the module itself goes on with softmax attention.

    With a locality, against softmax attention to the keys within that L1 distance.
    """
    found = {index: [ErrorSums() for _ in ones] for index, ones in forms.items()}

    def answer(index: int, call: Call) -> Tensor:
        true = call.softmax()
        wanted = true if locality is None else masked(call, locality)
        for form, sums in zip(forms.get(index, ()), found.get(index, ()), strict=True):
            _add(sums, form, call, wanted)
        return true

    with torch.no_grad():
        for batch in batches:
            with Attending(answer):
                run(module, batch)
    return found


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


def _add(sums: ErrorSums, form: nn.Module, call: Call, true: Tensor) -> None:
    got = form(call)
    there = _asked(call)
    uniform = replace(call, query=torch.zeros_like(call.query)).softmax()
    sums.uniform += _squares(torch.where(there, uniform - true, 0.0))
    sums.difference += _squares(torch.where(there, got - true, 0.0))
    sums.size += _squares(torch.where(there, true, 0.0))
    if isinstance(form, KernelAttention) and not form.feature_map.kernel_positive:
        denominators = form.denominators(call).mT[..., None]
        kept = denominators[there.expand_as(denominators)]
        sums.not_positive += int((kept <= 0).sum())
        sums.denominators += kept.numel()


def _asked(call: Call) -> Tensor:
    """True for queries that are there: of self-attention, those that are not masked as keys."""
    length, keys = call.query.shape[2], call.key.shape[2]
    if call.attn_mask is None or length != keys:
        return call.query.new_ones(1, 1, 1, 1, dtype=torch.bool)
    seen = masks.key_mask(call.attn_mask, call.query.shape[0], keys)
    return seen[:, None, :, None]


def _squares(x: Tensor) -> float:
    return float(x.double().square().sum())
