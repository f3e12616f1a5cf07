"""Tokens of a prompt in one call of a pool: as many as delay other sequences no longer than few.

    on a CPU   FEW: the time of a call grows with its tokens
    on a GPU   FEW, and twice as many as long as these take SLOWER times the time of FEW at most

A GPU that 64 tokens do not fill takes as long for many more of them, and so prompts a fraction of
their time. How many is measured when the pool opens, with the model itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np

from linexport.artifact.runtime import Artifact

log = logging.getLogger(__name__)

FEW, MOST = 64, 2048
SLOWER = 1.25
REPEATS = 3
"""Calls of each length, of which the fastest counts; one before them is not timed."""


def measured_chunk(model: Artifact) -> int:
    """Return the tokens of a prompt that a call of a pool takes, of a model with states."""
    most = min(MOST, model.longest or MOST)
    if most <= FEW or all(isinstance(x, np.ndarray) for x in _beginning(model).values()):
        return min(FEW, most)
    found = longest_as_fast(lambda tokens: _seconds(model, tokens), most)
    log.info("Prompts are computed %d tokens at a time, which take as long as %d.", found, FEW)
    return found


def longest_as_fast(seconds: Callable[[int], float], most: int) -> int:
    """Return the largest FEW times a power of two, ``most`` at most, that is as fast as FEW."""
    limit, found = SLOWER * seconds(FEW), FEW
    while 2 * found <= most and seconds(2 * found) <= limit:
        found *= 2
    return found


def _beginning(model: Artifact) -> dict[str, np.ndarray]:
    return model.hold(model.initial_state(1))


def _seconds(model: Artifact, tokens: int) -> float:
    """Return the time of a call that begins a sequence with so many tokens."""
    sizes = {model.token_axis.dim: tokens}
    given = {
        i.name: np.zeros(
            [d if isinstance(d, int) else sizes.get(d or "", 1) for d in i.shape], i.dtype
        )
        for i in model.manifest.inputs
        if i.name not in model.states and i.default is None
    }
    feeds, _ = model.inputs.bind([given], {})
    times = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        model.call(feeds, _beginning(model), logits_to_keep=1)
        times.append(time.perf_counter() - start)
    return min(times[1:])
