"""How far the original's own padded rows are from each row alone, which the artifact follows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from linexport.parity.compare import compare_arrays
from linexport.parity.language.prompts import PADDINGS, SEQUENCE, Prompt, Trial
from linexport.parity.language.rows_alone import run_alone, run_batch
from linexport.parity.reference.module import Reference
from linexport.parity.tolerances import TOLERANCES

log = logging.getLogger(__name__)

LENGTH = 65
"""Tokens of the rows that are looked at, or the length that is nearest: longer than convolutions,
and short."""


def padded_error(
    trials: Sequence[Trial],
    prompts: Sequence[Prompt],
    alone: Sequence[np.ndarray],
    single: Reference,
    double: Callable[[], Reference],
) -> float | None:
    """Return the largest error of the original on padded rows, relative to the largest output.

    What is not within the tolerance of float32 is measured in float64, where rounding is nothing.

    Args:
        trials: of which those of one length with padding are run.
        prompts: of the trials.
        alone: the original's outputs of each prompt's rows alone, see ``run_alone``.
        single: the original in float32.
        double: makes the one in float64.

    Returns:
        None without padded trials, or where the original does not run on them.
    """
    whole = {t.case.sizes[SEQUENCE] for t in trials if t.padding in PADDINGS and len(t.pieces) == 1}
    length = min(whole, key=lambda n: abs(n - LENGTH), default=0)
    errors = []
    for trial, prompt, expected in zip(trials, prompts, alone, strict=True):
        if trial.padding not in PADDINGS or trial.pieces != (length,):
            continue
        try:
            errors.append(_error(prompt, expected, single, double))
        except Exception as failure:  # whatever the module raises
            log.info("the original does not run with %s: %r", trial.padding, failure)
            return None
    return max(errors, default=None)


def _error(
    prompt: Prompt,
    alone: np.ndarray,
    single: Reference,
    double: Callable[[], Reference],
) -> float:
    tolerance = TOLERANCES["float32"]
    found = compare_arrays(alone, prompt.real(run_batch(single, prompt)), tolerance)
    if not found.passed:
        run = partial(run_batch, double())
        found = compare_arrays(run_alone(run, prompt), prompt.real(run(prompt)), tolerance)
    return found.max_relative_error


def note(error: float | None) -> list[str]:
    """Return the note on an original whose padded rows are not what they are alone."""
    if error is None or error <= TOLERANCES["float32"].relative:
        return []
    return [
        f"Padded rows of the original differ by {error:.1g} of the largest output from the same "
        "rows alone. The artifact gives for a padded row what the original gives for the row alone."
    ]
