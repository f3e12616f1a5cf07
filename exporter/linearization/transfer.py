"""Attention transfer: every form of every layer learns the softmax attention that it may replace.

    loss = |o^ - o|^2 / |o|^2        o softmax attention's output on the original's own inputs

All forms of all layers learn in one run of the original: each is trained where its call is
answered, so that the activations of one call alone are in memory. Learned are the gain of queries,
that of far keys, and the numbers of feature maps. Each form keeps the values with the smallest
error on rows that it was not trained on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from linexport.linearization.find_softmax import run
from linexport.linearization.forms import KernelAttention
from linexport.linearization.task_loss import TaskRows
from linexport.linearization.window_forms import WindowForm
from linexport.models.softmax_calls import Attending, Call

RATE = 1e-2
EVERY = 10
"""Steps between two looks at rows that are not trained on."""
PATIENCE = 3
"""Looks at which no form has improved by ``LEAST`` before the transfer ends."""
LEAST = 0.01
MOST_STEPS = 400

Forms = Mapping[int, Sequence[KernelAttention]]
"""By the index of their sites."""


def learned_of(form: KernelAttention) -> list[Tensor]:
    """Return the tensors of a form that are learned."""
    found = [form.gain, *(x for x in form.feature_map.frozen() if x.is_floating_point())]
    return [*found, form.far_gain] if isinstance(form, WindowForm) else found


def transfer(
    module: nn.Module,
    forms: Forms,
    fit: TaskRows,
    judged: TaskRows,
    left: Callable[[], float],
    seed: int,
) -> int:
    """Train all forms in place; returns the steps that were taken.

    Args:
        module: with softmax attention.
        forms: of every site.
        fit: rows to train on.
        judged: rows that the best values are kept by.
        left: the share of the time that is left, from 1 down; at 0 the transfer ends.
        seed: of the batches.
    """
    everyone = [form for ones in forms.values() for form in ones]
    tensors = [learned_of(form) for form in everyone]
    flat = [x for found in tensors for x in found]
    for x in flat:
        x.requires_grad_(True)
    optimizer = torch.optim.Adam(flat, lr=RATE)
    generator = torch.Generator().manual_seed(seed)
    best = _errors(module, forms, judged)
    kept = [[x.detach().clone() for x in found] for found in tensors]
    step = worse = 0
    while left() > 0 and worse < PATIENCE and step < MOST_STEPS:
        for group in optimizer.param_groups:
            group["lr"] = RATE * max(0.05, min(left(), 1 - step / MOST_STEPS))
        rows = torch.randint(len(fit), (max(1, fit.at_once // 2),), generator=generator)
        optimizer.zero_grad()
        _each(module, forms, fit.take(rows), lambda at, loss: loss.backward(), grad=True)
        for found in tensors:
            nn.utils.clip_grad_norm_(found, 1.0)
        optimizer.step()
        step += 1
        if step % EVERY == 0:
            now = _errors(module, forms, judged)
            worse = (
                0 if any(a < (1 - LEAST) * b for a, b in zip(now, best, strict=True)) else worse + 1
            )
            for at, found in enumerate(tensors):
                if now[at] < best[at]:
                    best[at], kept[at] = now[at], [x.detach().clone() for x in found]
    with torch.no_grad():
        for found, values in zip(tensors, kept, strict=True):
            for x, value in zip(found, values, strict=True):
                x.copy_(value)
                x.grad = None
                x.requires_grad_(False)
    return step


def _errors(module: nn.Module, forms: Forms, data: TaskRows) -> list[float]:
    count = sum(len(ones) for ones in forms.values())
    found = [0.0] * count

    def add(at: int, loss: Tensor) -> None:
        found[at] += float(loss)

    for batch in data.batches():
        _each(module, forms, batch, add, grad=False)
    return found


def _each(
    module: nn.Module,
    forms: Forms,
    batch: TaskRows,
    seen: Callable[[int, Tensor], object],
    grad: bool,
) -> None:
    """Hand the loss of every form on one batch to ``seen``, by its place."""
    starts = itertools.accumulate((len(ones) for ones in forms.values()), initial=0)
    places = dict(zip(forms, starts, strict=False))

    def answer(index: int, call: Call) -> Tensor:
        true = call.softmax()
        for at, form in enumerate(forms.get(index, ())):
            with torch.set_grad_enabled(grad):
                loss = (form(call) - true).square().sum() / true.square().sum()
                seen(places[index] + at, loss)
        return true

    with torch.no_grad(), Attending(answer):
        run(module, batch.rows)
