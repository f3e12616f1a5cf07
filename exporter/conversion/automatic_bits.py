"""The smallest choice of bits whose measured divergence is within a limit.

    allocations by predicted divergence -> the first within the limit, measured -> accepted, or
                                           the prediction is corrected and a larger one tried

What was measured on the way is the Pareto page: divergence over size, and over time of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from linexport.artifact.temporary import Run
from linexport.manifest.quantisation import ParetoPoint
from linexport.quantization.allocate import Allocation
from linexport.quantization.by_target import FORMS
from linexport.quantization.calibration_inputs import CalibrationInputs
from linexport.quantization.choose_bits import Chosen, Quantiser
from linexport.quantization.opened import FloatModel
from linexport.quantization.proof import divergence
from linexport.quantization.window_pieces import outputs_of
from linexport.timing.latency import Settings, interleaved

MARGIN = 0.9
"""Part of the limit that a predicted divergence may take."""

PARETO_POINTS = 24

STEPS = Settings(repeats=15, lead_in=1)


def within(
    limit: float,
    alone: Mapping[str, float],
    model: FloatModel,
    quantiser: Quantiser,
    inputs: CalibrationInputs,
) -> tuple[list[Chosen], tuple[ParetoPoint, ...]]:
    """Return the smallest choice that is measured to be within the limit, else the largest.

    Args:
        limit: largest mean divergence, nats.
        alone: divergence of each weight alone in 4 bits, nats.
        model: the model, in float32 and as it is deployed.
        quantiser: of its weights.
        inputs: text to compare on.
    """
    path = quantiser.mixed(dict(alone))
    tried: dict[int, tuple[Run, float]] = {}
    allowed, taken = MARGIN * limit, len(path) - 1
    reference, _ = model.reference()
    for place, allocation in enumerate(path):
        last = place == len(path) - 1
        if place and allocation.predicted > allowed and not last:
            continue
        tried[place] = _measured(quantiser.allocated(allocation), model, reference, inputs)
        found = tried[place][1]
        if found <= limit:
            taken = place
            break
        # The prediction was too low by this factor: ask for as much less.
        allowed = min(allowed, allocation.predicted * limit / found * MARGIN)
    points = _points(path, tried, taken, _step_times(tried, model, inputs))
    return quantiser.allocated(path[taken]), points


def _measured(
    chosen: Sequence[Chosen], model: FloatModel, reference: Run, inputs: CalibrationInputs
) -> tuple[Run, float]:
    """Open a choice; returns it and its mean divergence."""
    assert inputs.language is not None and inputs.windows is not None
    artifact, windows = model.artifact, inputs.windows.compared
    rewrite = FORMS[artifact.manifest.target].rewrite
    run = model.deployed(rewrite(model.written, {c.weight.name: c for c in chosen}))
    exactly, ours = (outputs_of(artifact, inputs.language, one) for one in (reference, run))
    found, _ = divergence(artifact, inputs.language, exactly, ours, windows)
    return run, found.mean


def _step_times(
    tried: Mapping[int, tuple[Run, float]], model: FloatModel, inputs: CalibrationInputs
) -> dict[int, float]:
    """Median milliseconds of one token for each choice tried, in turns; none for GPUs."""
    assert inputs.windows is not None
    if not FORMS[model.artifact.manifest.target].on_cpu:
        return {}
    feeds = model.artifact.feeds(inputs.windows.compared[0][None, :1])
    calls = {str(place): (lambda run=run: run(feeds)) for place, (run, _) in tried.items()}
    return {int(place): float(np.median(t)) for place, t in interleaved(calls, STEPS).items()}


def _points(
    path: Sequence[Allocation],
    tried: Mapping[int, tuple[Run, float]],
    taken: int,
    steps: Mapping[int, float],
) -> tuple[ParetoPoint, ...]:
    every = max(1, len(path) // PARETO_POINTS)
    shown = sorted({*range(0, len(path), every), *tried, len(path) - 1})
    return tuple(
        ParetoPoint(
            path[place].bytes,
            path[place].predicted,
            tried[place][1] if place in tried else None,
            steps.get(place),
            place == taken,
        )
        for place in shown
    )
