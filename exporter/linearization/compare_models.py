"""Original and linear form, whole: layer by layer as they run, and in what comes out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from linexport.errors import ParityError
from linexport.linearization.calibration import Rows
from linexport.linearization.distil import layer_outputs
from linexport.linearization.find_softmax import Site
from linexport.linearization.judge import uniform
from linexport.models.softmax_calls import Attending
from linexport.system.torch_internals.trees import pytree

REST = 1e-5
"""Relative rounding between ways of PyTorch to compute the same attention."""


@torch.no_grad()
def layer_errors(
    original: nn.Module, linear: nn.Module, sites: Sequence[Site], batches: Sequence[Rows]
) -> dict[int, float]:
    """|y^ - y| / |y| after the output projection of each site, upstream errors included."""
    names = [site.projection for site in sites if site.projection is not None]
    difference, size = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for batch in batches:
        got, want = (layer_outputs(m, names, batch) for m in (linear, original))
        for name in difference:
            for g, w in zip(got[name], want[name], strict=True):
                difference[name] += float((g - w).double().square().sum())
                size[name] += float(w.double().square().sum())
    return {
        site.index: math.sqrt(difference[site.projection] / (size[site.projection] or 1.0))
        for site in sites
        if site.projection is not None
    }


def rest_error(original: nn.Module, unreplaced: nn.Module, batches: Sequence[Rows]) -> float:
    """``output_error`` of the way from a module to its linear form with every form left out.

    Raises:
        ParityError: something besides softmax attention is not what it was.
    """
    error = output_error(original, unreplaced, batches)
    if error > REST:
        raise ParityError(
            f"With softmax attention left as it is, the outputs differ from the original's by "
            f"{error:.2g} already; expected at most {REST:g}. The module is not the same from call "
            "to call, or checks its submodules' classes: give it as an exported program."
        )
    return error


def uniform_output_error(
    original: nn.Module, sites: Sequence[Site], batches: Sequence[Rows]
) -> float | None:
    """``output_error`` if these layers attended to all keys alike; None if there are none."""
    indices = {site.index for site in sites}

    class Uniform(nn.Module):
        def forward(self, *batch: Any) -> Any:
            with Attending(lambda at, call: uniform(call) if at in indices else call.softmax()):
                return original(*batch)

    return output_error(original, Uniform(), batches) if indices else None


@torch.no_grad()
def output_error(original: nn.Module, linear: nn.Module, batches: Sequence[Rows]) -> float:
    """|y^ - y| / |y| over all floating-point outputs.

    Raises:
        ParityError: an output of the linear form is not finite where the original's is.
    """
    difference = size = 0.0
    for batch in batches:
        for got, want in zip(_outputs(linear, batch), _outputs(original, batch), strict=True):
            there = want.isfinite()
            if not bool(got[there].isfinite().all()):
                raise ParityError(
                    "The linear form gives NaN or infinite outputs where the original's are "
                    "finite. Choose a map with a positive kernel, such as favor+ or taylor2."
                )
            difference += float((got - want)[there].double().square().sum())
            size += float(want[there].double().square().sum())
    return math.sqrt(difference / (size or 1.0))


def _outputs(module: nn.Module, batch: Rows) -> list[Any]:
    leaves = pytree.tree_leaves(module(*batch))
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.is_floating_point()]
