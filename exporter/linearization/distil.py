"""Distillation: the outputs of the original's layers, learned by the new ones on the user's data.

    loss = mean over layers of |y^ - y|^2 / |y|^2      y after the output projection

Each new layer gets the inputs it has in the linear model, so that later layers also learn to make
up for earlier ones. Learned are the projections of feature maps, the scale of the queries, the gain
of far keys beside a window, and the output projections, which are copied first: the original is not
changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from linexport.errors import UsageError
from linexport.linearization.calibration import Calibration, Rows, at_once, row_batches
from linexport.linearization.find_softmax import Site
from linexport.linearization.forms import KernelAttention
from linexport.linearization.replace import stem
from linexport.linearization.window_forms import WindowForm
from linexport.manifest.linearization_records import DistillationRecord
from linexport.models.attention import LinearAttention
from linexport.models.softmax_calls import Projecting
from linexport.models.window_attention import WindowedAttention

RATE = 5e-3
JUDGED = 128
"""Held-out rows that early stopping looks at."""
EVERY = 20
PATIENCE = 5
"""Looks without an improvement before it stops."""


def distil(
    original: nn.Module,
    linear: nn.Module,
    sites: Sequence[Site],
    data: Calibration,
    steps: int,
    seed: int,
    advance: Callable[[int, str], None],
) -> DistillationRecord:
    """Train the linear module in place; keep the weights with the smallest held-out loss.

    Args:
        original: the module with softmax attention, the teacher.
        linear: the module in linear form, the student.
        sites: the replaced attention calls.
        data: inputs to train on and to hold out.
        steps: largest number of optimiser steps.
        seed: seed of the batches.
        advance: called with the steps done and the held-out loss so far.

    Raises:
        UsageError: no replaced layer has an output projection to compare after.
    """
    names = [site.projection for site in sites if site.projection is not None]
    if not names:
        raise UsageError(
            "Distillation compares layers after their output projections, and none of the replaced "
            "ones has one. Leave --distil out."
        )
    tensors = learned(linear, [name.rpartition(".")[0] for name in names])
    optimizer = torch.optim.Adam(tensors, lr=RATE)
    loss = _Loss(original, linear, names)
    generator = torch.Generator().manual_seed(seed)
    judged = tuple(x[:JUDGED] for x in data.held_out)
    before = best = loss.value(judged)
    kept, best_step, step, worse = [x.detach().clone() for x in tensors], 0, 0, 0
    while step < steps and worse < PATIENCE:
        for group in optimizer.param_groups:
            group["lr"] = RATE * (0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)
        rows = torch.randint(len(data.fit[0]), (at_once(data.fit),), generator=generator)
        # Not backward: weights that are shared with the original must not collect gradients.
        gradients = torch.autograd.grad(
            loss(tuple(x[rows] for x in data.fit)), tensors, allow_unused=True
        )
        for x, gradient in zip(tensors, gradients, strict=True):
            x.grad = gradient
        nn.utils.clip_grad_norm_(tensors, 1.0)
        optimizer.step()
        step += 1
        if step % EVERY == 0 or step == steps:
            now = loss.value(judged)
            worse = 0 if now < best else worse + 1
            if now < best:
                best, best_step, kept = now, step, [x.detach().clone() for x in tensors]
            advance(step, f"held-out loss {math.sqrt(best):.3f}")
    with torch.no_grad():
        for x, value in zip(tensors, kept, strict=True):
            x.copy_(value)
            x.grad = None
            x.requires_grad_(False)
    return DistillationRecord(step, steps, best_step, before, best, sum(x.numel() for x in tensors))


class _Loss:
    """Layer outputs of both, compared."""

    def __init__(self, original: nn.Module, linear: nn.Module, names: Sequence[str]) -> None:
        self.original, self.linear, self.names = original, linear, names

    def __call__(self, batch: Rows) -> Tensor:
        with torch.no_grad():
            expected = layer_outputs(self.original, self.names, batch)
        got = layer_outputs(self.linear, self.names, batch)
        losses = [
            (g - w).square().sum() / w.square().sum()
            for name in expected
            for g, w in zip(got[name], expected[name], strict=True)
        ]
        return torch.stack(losses).mean()

    @torch.no_grad()
    def value(self, rows: Rows) -> float:
        parts = row_batches(rows)
        return sum(float(self(part)) * len(part[0]) for part in parts) / len(rows[0])


def layer_outputs(module: nn.Module, names: Sequence[str], batch: Rows) -> dict[str, list[Tensor]]:
    """Outputs of the products with some of the model's parameters, by parameter name."""
    seen: dict[str, list[Tensor]] = {name: [] for name in dict.fromkeys(names)}
    parameters = [(name, stem(module).get_parameter(name)) for name in seen]
    with Projecting(parameters, lambda name, result: seen[name].append(result)):
        module(*batch)
    return seen


def learned(linear: nn.Module, owners: Iterable[str]) -> list[Tensor]:
    """Return tensors to learn: weights of modules, by their names, and numbers of forms.

    Weights are copied where they were shared with the original.
    """
    found: list[Tensor] = []
    for name in dict.fromkeys(owners):
        owner = stem(linear).get_submodule(name)
        found += [_own(owner, own) for own, _ in list(owner.named_parameters(recurse=False))]
    for module in list(linear.modules()):
        if isinstance(module, KernelAttention):
            found.append(module.gain)
        elif isinstance(module, LinearAttention):
            if not any(module.query.weight is x for x in found):
                found.append(_own(module.query, "weight"))
        else:
            continue
        found += [x for x in module.feature_map.frozen() if x.is_floating_point()]
        if isinstance(module, WindowForm | WindowedAttention):
            found.append(module.far_gain)
    return [x.requires_grad_(True) for x in {id(x): x for x in found}.values()]


def _own(module: nn.Module, name: str) -> nn.Parameter:
    """A parameter in place of one that is shared, with the same value."""
    copied = nn.Parameter(getattr(module, name).detach().clone())
    setattr(module, name, copied)
    return copied
