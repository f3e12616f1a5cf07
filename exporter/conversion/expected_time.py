"""Seconds that a long stage will take, said before it: forecast from calls of the original.

    comparing    a call of every planned case in float32, and in float64 where that is made
    measuring    a plain export of what was traced, then the time allowed to each runner

One call at the traced length, and where that promises a long stage one at a longer length, say how
the time of a call grows with the tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import torch

from linexport.graph.dims import sequence
from linexport.parity import ModelUnderTest
from linexport.parity.cases import Case, draw_inputs, plan_cases
from linexport.parity.language.check import FEW_STEPS
from linexport.parity.language.prompts import BATCH, SEQUENCE, plan_prompts
from linexport.parity.language.split import split_model
from linexport.parity.reference.module import Reference
from linexport.parity.reference.outputs import PATIENCE
from linexport.system.progress import Progress
from linexport.timing.latency import BenchPlan

WORTH_SAYING = 10.0
"""Seconds of a stage below which nothing is said."""

LONGER = 512
"""Tokens of the second call."""

SURE = 1.0
"""Forecast in seconds below which the second call is not made."""

IN_FLOAT64 = 2.0
"""Times of a float32 call that one in float64 takes, where it is made."""

PROCESS = 4.0
"""Seconds in which a process that measures memory imports PyTorch and opens a model."""

OF_TRACING = 0.25
"""Part of the time of tracing that a plain export takes, which begins at what was traced."""

RUNNERS = 3

Sizes = Mapping[str, int]


def say_comparison(shown: Progress, tested: ModelUnderTest) -> None:
    """Say how long the comparison of a model with its original takes, where that is long."""
    parts = split_model(tested)
    if parts is None:
        seconds = comparison(tested, lambda sizes: _seconds_of_call(tested, sizes))
    else:
        decoder = parts.decoder
        seconds = of_prompts(decoder, lambda sizes: _seconds_of_call(decoder, sizes))
    _say(shown, "Comparing it with the original", seconds)


def say_measurement(
    shown: Progress, tested: ModelUnderTest, plan: BenchPlan, lengths: int, traced: float
) -> None:
    """Say how long a measurement takes, where that is long.

    Args:
        shown: gets the sentence.
        tested: the model.
        plan: of the measurement.
        lengths: how many the user names; 0 for those of the plan.
        traced: seconds that tracing the original took.
    """
    counted = lengths or len(plan.lengths if sequence(tested.dims) else plan.batches)
    _say(shown, "Measuring it", measurement(plan, counted, traced))


def comparison(tested: ModelUnderTest, seconds_of_call: Callable[[Sizes], float]) -> float:
    """Return about how many seconds a comparison takes.

    Args:
        tested: the model.
        seconds_of_call: seconds of one call of the original at these sizes.
    """
    first = sequence(tested.dims)
    cases = plan_cases(tested.dims, tested.traced, True, 0, tested.input_shapes, tested.chosen, 0)
    base = dict(tested.traced)
    seconds = seconds_of_call(base)
    whole = _total(cases, first, base, seconds, 1.0, seconds)
    if first is None or whole < SURE:
        return whole
    longer = {**base, first: tested.dims[first].nearest(LONGER)}
    if longer[first] <= base[first]:
        return whole
    second = seconds_of_call(longer)
    if not second:
        return whole
    grown = math.log(second / seconds) / math.log(longer[first] / base[first])
    return _total(cases, first, longer, second, min(max(grown, 1.0), 2.0), min(seconds, second))


def of_prompts(tested: ModelUnderTest, seconds_of_call: Callable[[Sizes], float]) -> float:
    """Return about how many seconds the comparison of a language model takes.

    The artifact takes about the original's time: for a token of a long prompt, and for a call.

    Args:
        tested: the model.
        seconds_of_call: seconds of one call of the original at these sizes.
    """
    language = tested.loaded.language
    assert language is not None
    continued = bool(tested.states)
    trials = plan_prompts(tested.dims, language.context, 0, tested.chosen, continued, sides=False)
    prompts = [trial.prompt(language.vocabulary) for trial in trials]
    longer = tested.dims[SEQUENCE].nearest(LONGER)
    call = seconds_of_call({BATCH: 1, SEQUENCE: 1})
    token = seconds_of_call({BATCH: 1, SEQUENCE: longer}) / longer
    # The original runs a row once, wherever its padding is.
    real = sum({row.key: row.tokens.size for one in prompts for row in one.rows()}.values())
    fed = sum(one.mask.size for one in prompts)
    calls = sum(len(trial.pieces) for trial in trials) + FEW_STEPS
    return token * (real + fed) + call * calls


def measurement(plan: BenchPlan, lengths: int, traced: float) -> float:
    """Return about how many seconds a measurement takes; see ``say_measurement``."""
    timed = RUNNERS * lengths * plan.settings.seconds
    memory = RUNNERS * min(lengths, 2) * PROCESS if plan.memory else 0.0
    return OF_TRACING * traced + timed + plan.settings.seconds + memory


def _total(
    cases: list[Case], first: str | None, at: Sizes, seconds: float, power: float, least: float
) -> float:
    """Return seconds of all cases, by a call at some sizes and how it grows with the tokens.

    ``least`` is what a call of any size takes.
    """
    found = 0.0
    for case in cases:
        rows = math.prod(size / at[n] for n, size in case.sizes.items() if n != first)
        tokens = case.sizes[first] / at[first] if first else 1.0
        single = max(least, seconds * rows * tokens**power)
        found += single if single > PATIENCE else (1 + IN_FLOAT64) * single
    return found


def _seconds_of_call(tested: ModelUnderTest, sizes: Sizes) -> float:
    """Return the seconds of a call; 0.0 where the original does not run at these sizes."""
    try:
        inputs = draw_inputs(tested.loaded, tested.input_shapes, Case("time", sizes, 0))
        original = Reference(tested.loaded, torch.float32)
        start = time.perf_counter()
        original(inputs)
    except Exception:  # the comparison says why
        return 0.0
    return time.perf_counter() - start


def _say(shown: Progress, what: str, seconds: float) -> None:
    if seconds >= WORTH_SAYING:
        shown.note(f"    {what} takes about {_rounded(seconds)}.")


def _rounded(seconds: float) -> str:
    if seconds < 90:
        return f"{5 * round(seconds / 5)} s"
    return f"{round(seconds / 60)} minutes"
