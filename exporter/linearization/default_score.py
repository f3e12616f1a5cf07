"""Scores of models whose kind is known, where the user gives none, on held-out rows.

    language model    bits per token: mean -log2 p(next token), from its own tokens
    classifier        share of its answers in which the largest logit is the original's

A language model is one whose every attention is causal and which gives logits (B, T, V) of tokens
(B, T); the second argument, if any, says which of them are there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linexport.linearization.calibration import Rows
from linexport.linearization.find_softmax import Site
from linexport.models.registry import ReferenceModel
from linexport.sources.hugging_face.whole import Whole
from linexport.sources.metric import Metric
from linexport.system.torch_internals.trees import pytree

_HEADS = ("Classification", "MaskedLM")
"""Parts of names of classes in transformers whose outputs are logits of classes."""


@torch.no_grad()
def default_score(
    original: nn.Module, sites: Sequence[Site], batches: Sequence[Rows]
) -> Metric | None:
    """The score of a kind of model that is known, else None."""
    if is_language_model(original, sites, batches[0]):
        return Metric("bits per token", partial(_bits_per_token, batches=batches), True)
    if is_classifier(original):
        expected = [first_output(original, batch).argmax(-1) for batch in batches]
        evaluate = partial(_agreement, batches=batches, expected=expected)
        return Metric("agreement with the original's classes", evaluate)
    return None


def is_classifier(module: nn.Module) -> bool:
    """Return whether the outputs are known to be logits of classes."""
    if isinstance(module, Whole):
        return any(part in type(module.model).__name__ for part in _HEADS)
    return isinstance(module, ReferenceModel) and module.gives_classes


@torch.no_grad()
def is_language_model(module: nn.Module, sites: Sequence[Site], batch: Rows) -> bool:
    """Return whether outputs are logits of the next token."""
    tokens = batch[0]
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.shape[1] < 2:
        return False
    if len(batch) > 2 or not sites or not all(site.causal for site in sites):
        return False
    logits = first_output(module, tuple(x[:1] for x in batch))
    return (
        logits.dim() == 3
        and logits.shape[:2] == tokens[:1].shape
        and int(tokens.max()) < logits.shape[-1]
    )


def first_output(module: nn.Module, batch: Rows) -> Tensor:
    """Return the first tensor that a module gives for a batch."""
    leaves: list[Any] = pytree.tree_leaves(module(*batch))
    first: Tensor = leaves[0]
    return first


def token_losses(logits: Tensor, batch: Rows) -> tuple[Tensor, Tensor]:
    """Return -log p of every next token, (B, T - 1) in float64, and 1.0 for those there."""
    losses = F.cross_entropy(logits[:, :-1].mT.double(), batch[0][:, 1:].long(), reduction="none")
    return losses, torch.ones_like(losses) if len(batch) == 1 else (batch[1][:, 1:] != 0).double()


@torch.no_grad()
def _bits_per_token(module: nn.Module, batches: Sequence[Rows]) -> float:
    total = count = 0.0
    for batch in batches:
        losses, there = token_losses(first_output(module, batch), batch)
        total += float((losses * there).sum())
        count += float(there.sum())
    return total / (max(count, 1.0) * math.log(2))


@torch.no_grad()
def _agreement(module: nn.Module, batches: Sequence[Rows], expected: Sequence[Tensor]) -> float:
    same = [
        (first_output(module, batch).argmax(-1) == want).double().flatten()
        for batch, want in zip(batches, expected, strict=True)
    ]
    return float(torch.cat(same).mean())
