"""Fine-tuning of a model in linear form towards the outputs of the original, on the user's data.

    loss = KL(original || linear) of logits, or |y^ - y|^2 / |y|^2 of other outputs

Learned are all weights of the modules whose attention was replaced, of their output projections and
of the forms, in copies: the original is not changed. The rate of a tensor is a share of the root
mean square of its values, so that small and large models take the same settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from linexport.linearization.default_score import first_output
from linexport.linearization.distil import learned
from linexport.linearization.find_softmax import Site
from linexport.linearization.replace import stem
from linexport.linearization.task_loss import TaskRows, divergence, squared_distance

RATE = 5e-3
"""Change of a number in one step, over the root mean square of its tensor."""
LEAST_RATE = 1e-3
"""Where that is small, as of gains that begin at zero."""
EVERY = 20
PATIENCE = 5
"""Looks without an improvement before it stops."""
MOST_STEPS = 2000


@dataclass(frozen=True)
class Tuned:
    """Steps taken, and the mean loss that the kept weights have."""

    steps: int
    loss: float


def tuned_tensors(linear: nn.Module, sites: Sequence[Site]) -> list[Tensor]:
    """Return the tensors to learn, copied where they were shared with the original."""
    modules = dict(stem(linear).named_modules())
    names = [site.name.partition("#")[0] for site in sites]
    inside = [
        f"{name}.{own}".strip(".")
        for name in (name if name in modules else "" for name in names)  # "": of the model itself
        for own, _ in modules[name].named_modules()
    ]
    after = [site.projection.rpartition(".")[0] for site in sites if site.projection]
    return learned(linear, [*inside, *after])


def fine_tune(
    original: nn.Module,
    linear: nn.Module,
    tensors: Sequence[Tensor],
    fit: TaskRows,
    judge: Callable[[], tuple[float, bool]],
    left: Callable[[], float],
    logits: bool,
    seed: int,
) -> Tuned:
    """Train the linear module in place; keep the weights that are enough, or of smallest loss.

    Args:
        original: the teacher.
        linear: the student.
        tensors: those of it that are learned.
        fit: rows to train on.
        judge: gives the loss on rows that are not trained on, and whether that is good enough.
        left: the share of the time that is left, from 1 down; at 0 it ends.
        logits: outputs are logits.
        seed: of the batches.
    """
    loss_of = divergence if logits else squared_distance
    optimizer = torch.optim.Adam([{"params": [x], "lr": 0.0} for x in tensors])
    rates = [max(RATE * float(x.detach().square().mean().sqrt()), LEAST_RATE) for x in tensors]
    generator = torch.Generator().manual_seed(seed)
    best, enough = judge()
    kept = [x.detach().clone() for x in tensors]
    step = worse = 0
    while left() > 0 and worse < PATIENCE and step < MOST_STEPS and not enough:
        done = max(1 - left(), step / MOST_STEPS)
        share = min(1.0, (step + 1) / EVERY) * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * share
        batch = fit.take(torch.randint(len(fit), (fit.at_once,), generator=generator))
        with torch.no_grad():
            expected = first_output(original, batch.rows)
        loss = loss_of(first_output(linear, batch.rows), batch, expected).mean()
        # Not backward: weights that are shared with the original must not collect gradients.
        gradients = torch.autograd.grad(loss, list(tensors), allow_unused=True)
        for x, gradient in zip(tensors, gradients, strict=True):
            x.grad = gradient
        nn.utils.clip_grad_norm_(tensors, 1.0)
        optimizer.step()
        step += 1
        if step % EVERY == 0:
            now, enough = judge()
            worse = 0 if now < best else worse + 1
            if now < best or enough:
                best, kept = now, [x.detach().clone() for x in tensors]
    with torch.no_grad():
        for x, value in zip(tensors, kept, strict=True):
            x.copy_(value)
            x.grad = None
            x.requires_grad_(False)
    return Tuned(step, best)
