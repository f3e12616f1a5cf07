"""The loss of a task, row by row, and the smooth one that a search is led by.

    kind              loss of a row, by which a drop is judged       smooth loss
    language model    -log2 p(next token) over its tokens            the same
    labels            1 if the largest logit is not the label's      -log2 p(label)
    classifier        1 if it is not the original's                  divergence from the original
    any other model   |y^ - y| / |y|, y the original's output        its square

Rows of several answers count the share of their answers. Where rows have several numbers of tokens,
each counts by its own: the mean over rows is then that over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linexport.errors import UsageError
from linexport.linearization.calibration import Rows
from linexport.linearization.default_score import (
    first_output,
    is_classifier,
    is_language_model,
    token_losses,
)
from linexport.linearization.find_softmax import Site

MOST_TOKENS = 2048
"""Tokens of the rows that a model is run on at once."""


@dataclass(frozen=True)
class TaskRows:
    """Rows of the model's arguments, with a label of each where the user gave them."""

    rows: Rows
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows[0])

    def take(self, rows: Tensor | slice) -> TaskRows:
        """Return some of the rows."""
        labels = None if self.labels is None else self.labels[rows]
        return TaskRows(tuple(x[rows] for x in self.rows), labels)

    @property
    def at_once(self) -> int:
        """Rows that a model is run on at once."""
        first = self.rows[0]
        length = 1 if first.dim() < 2 else int(first.shape[1])
        return max(1, min(32, MOST_TOKENS // length))

    def batches(self) -> list[TaskRows]:
        """Return all rows in their order, some at once."""
        size = self.at_once
        return [self.take(slice(at, at + size)) for at in range(0, len(self), size)]


Losses = Callable[[Tensor, TaskRows, Tensor], Tensor]
"""Losses (B) in float64 of an output, its rows, and the output of the original for these."""


@dataclass(frozen=True)
class TaskLoss:
    """Loss of one kind of model.

    Attributes:
        name: of the quantity, as ``score`` gives it.
        judged: losses by which a drop is judged.
        smooth: losses that tell forms apart where few answers differ.
        needs_original: they compare with outputs of the original.
        counted: each row is right or wrong.
        is_share: the score is 1 - loss: higher is better.
    """

    name: str
    judged: Losses
    smooth: Losses
    needs_original: bool
    counted: bool = False
    is_share: bool = False

    @torch.no_grad()
    def of(
        self, module: nn.Module, original: nn.Module, data: TaskRows, smooth: bool = False
    ) -> Tensor:
        """Return the losses of all rows, float64 (N)."""
        function, found = self.smooth if smooth else self.judged, []
        for batch in data.batches():
            got = first_output(module, batch.rows)
            same = module is original or not self.needs_original
            found.append(function(got, batch, got if same else first_output(original, batch.rows)))
        return torch.cat(found)

    def score(self, losses: Tensor) -> float:
        """Return the mean as users know it: a share of right answers, or the loss itself."""
        mean = float(losses.mean())
        return 1 - mean if self.is_share else mean


def find_task(original: nn.Module, sites: Sequence[Site], data: TaskRows) -> TaskLoss:
    """Return the loss of a kind of model.

    Raises:
        UsageError: labels that do not fit the outputs.
    """
    rows = data.take(slice(2)).rows
    with torch.no_grad():
        output = first_output(original, rows)
    if data.labels is not None:
        _check_labels(output, data.labels)
        counted = output.dim() == 2
        return TaskLoss("accuracy", _wrong, _bits, False, counted, is_share=True)
    if is_language_model(original, sites, rows):
        language: Losses = _per_token
        if len(data.rows) == 2:
            mean = float((data.rows[1][:, 1:] != 0).double().sum(1).mean())
            language = _weighted(mean)
        return TaskLoss("bits per token", language, language, False)
    if is_classifier(original):
        name = "agreement with the original's classes"
        return TaskLoss(name, _differs, divergence, True, output.dim() == 2, is_share=True)
    return TaskLoss("relative error of the outputs", _distance, squared_distance, True)


def with_labels(data: TaskRows, labels: Tensor | None) -> TaskRows:
    """Return rows with the labels that the user gave.

    Raises:
        UsageError: they are not one of each row, or not integers.
    """
    if labels is None:
        return data
    if labels.is_floating_point() or labels.dim() == 0 or len(labels) != len(data):
        kind = str(labels.dtype).removeprefix("torch.")
        raise UsageError(
            f"The labels are {kind} {tuple(labels.shape)}; expected one class, an integer, of each "
            f"of the {len(data)} rows of the data."
        )
    return replace(data, labels=labels.long())


def _check_labels(output: Tensor, labels: Tensor) -> None:
    classes = int(output.shape[-1]) if output.dim() > 1 else 0
    if output.shape[1:-1] != labels.shape[1:] or not 0 <= int(labels.min()) <= int(
        labels.max()
    ) < max(classes, 1):
        raise UsageError(
            f"The labels have the shape {tuple(labels.shape)} and values from {int(labels.min())} "
            f"to {int(labels.max())}; expected a class for each vector of logits in the model's "
            f"first output, {tuple(output.shape)}."
        )


def _per_token(got: Tensor, batch: TaskRows, original: Tensor) -> Tensor:
    losses, there = token_losses(got, batch.rows)
    return (losses * there).mean(1) / math.log(2)


def _weighted(mean: float) -> Losses:
    def losses_of(got: Tensor, batch: TaskRows, original: Tensor) -> Tensor:
        losses, there = token_losses(got, batch.rows)
        return (losses * there).sum(1) / (max(mean, 1.0) * math.log(2))

    return losses_of


def _by_row(values: Tensor) -> Tensor:
    return values.double().flatten(1).mean(1) if values.dim() > 1 else values.double()


def _wrong(got: Tensor, batch: TaskRows, original: Tensor) -> Tensor:
    assert batch.labels is not None
    return _by_row(got.argmax(-1) != batch.labels)


def _bits(got: Tensor, batch: TaskRows, original: Tensor) -> Tensor:
    assert batch.labels is not None
    logits = got.double().movedim(-1, 1)
    return _by_row(F.cross_entropy(logits, batch.labels, reduction="none")) / math.log(2)


def _differs(got: Tensor, batch: TaskRows, original: Tensor) -> Tensor:
    return _by_row(got.argmax(-1) != original.argmax(-1))


def divergence(got: Tensor, batch: TaskRows, original: Tensor) -> Tensor:
    """KL(original || got) of logits in nats, the mean of each row."""
    expected, found = original.log_softmax(-1), got.log_softmax(-1)
    return _by_row((expected.exp() * (expected - found)).sum(-1))


def _distance(got: Tensor, batch: TaskRows, original: Tensor) -> Tensor:
    return squared_distance(got, batch, original).sqrt()


def squared_distance(got: Tensor, batch: TaskRows, original: Tensor) -> Tensor:
    """Return |y^ - y|^2 / |y|^2 of each row."""
    size = original.double().square().flatten(1).sum(1)
    return (got - original).double().square().flatten(1).sum(1) / size.clamp(min=1e-30)
