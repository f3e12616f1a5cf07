"""Drift of states, and of sequences that are fed in pieces.

    error(a, b) = max |a - b| / max |b|

A quantised model must stream as its float32 original does: its weights are the same numbers in
every call. Activations that are rounded to int8 are not: a difference of the last digit between a
whole and a split sequence can round to the next integer, and both are equally good. So streams are
compared with activations in float32, to float32's tolerance, and the drift with rounded ones is
reported separately.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from linexport.artifact.runtime import Artifact
from linexport.artifact.temporary import Arrays, Run

LENGTH = 150
PIECES = 5


def error(got: NDArray, expected: NDArray) -> float:
    """Return the largest difference, relative to the largest magnitude expected."""
    if not expected.size:
        return 0.0
    largest = float(np.abs(expected).max())
    difference = float(np.abs(got - expected).max())
    return difference / largest if largest else difference


def states(
    artifact: Artifact, got: Mapping[str, NDArray], expected: Mapping[str, NDArray]
) -> dict[str, float]:
    """Return the error of each floating-point state after the same sequence, by its past's name.

    States that one of the models does not give are left out.
    """
    return {
        s.past: error(got[s.present], expected[s.present])
        for s in artifact.manifest.states
        if s.present in expected and s.present in got and expected[s.present].dtype.kind == "f"
    }


def streaming(
    artifact: Artifact, run: Run, ids: NDArray[np.int64], seed: int
) -> tuple[float, dict[str, float]]:
    """Compare a split sequence with the whole one.

    Returns the largest error of outputs and states, and that of each floating-point state at the
    end, by its past's name.

    Args:
        artifact: names inputs and states.
        run: the model to check.
        ids: token ids (T,).
        seed: of the places to split at.
    """
    ids = ids[:LENGTH]
    pasts = {s.present: s.past for s in artifact.manifest.states}
    whole = run(artifact.feeds(ids[None]))
    outputs = [name for name in whole if name not in pasts]
    parts: dict[str, list[NDArray]] = {name: [] for name in outputs}
    state: Arrays = {}
    for piece in _pieces(ids, seed):
        result = run({**artifact.feeds(piece[None]), **state})
        state = {past: result[present] for present, past in pasts.items()}
        for name in outputs:
            parts[name].append(result[name])
    joined = {name: np.concatenate(values, axis=1) for name, values in parts.items()}
    errors = [error(joined[name], whole[name]) for name in outputs]
    ends = {present: state[past] for present, past in pasts.items()}
    by_state = states(artifact, ends, whole)
    return max([*errors, *by_state.values()]), by_state


def _pieces(ids: NDArray[np.int64], seed: int) -> Sequence[NDArray[np.int64]]:
    """Cut at random places; the last tokens come one by one."""
    singles = min(8, len(ids) - 1)
    draw = random.Random(seed)
    inside = range(1, len(ids) - singles)
    cuts = sorted(draw.sample(inside, min(PIECES, len(inside))))
    return np.split(ids, [*cuts, *range(len(ids) - singles, len(ids))])
