"""Latency of the artifact, a plain export and eager PyTorch: interleaved, p50 and p90."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from linexport.manifest.measured import (
    RUNNERS,
    LatencyRow,
    MeasuredExtent,
    MeasurementRecord,
    Times,
)
from linexport.system.json_object import JsonObject

Call = Callable[[], object]

PAUSE = 0.01
"""Seconds before each turn, for the threads of the previous baseline to stop spinning: PyTorch's do
so for 4 ms."""

WAKING = 0.1
"""Seconds that the uncounted calls of a turn may take. The first call after a pause finds its
threads asleep and its data out of the caches, and 0.1 ms may become 4; in long ones it is lost."""


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement.

    Attributes:
        warmup: calls before the ones that count.
        repeats: counted calls of each baseline.
        seconds: a baseline that has used this much time at one size stops early.
        patience: with fewer than three calls even, where it has used this much.
        longest: it is not called at a size at which one call, as far as those at smaller sizes can
            tell, takes more than this.
        threads: of every baseline; 0 for each one's own choice.
        lead_in: uncounted calls at the start of every turn, unless they take longer than
            ``WAKING``.
    """

    warmup: int = 3
    repeats: int = 20
    seconds: float = 2.0
    patience: float = 4.0
    longest: float = 10.0
    threads: int = 0
    lead_in: int = 1

    def record(self, extent: MeasuredExtent = "full") -> MeasurementRecord:
        """Return the settings as the manifest holds them."""
        taken = self.warmup, self.repeats, self.threads, True, self.longest
        return MeasurementRecord(*taken, extent=extent)


@dataclass(frozen=True)
class BenchPlan:
    """How much is measured of an artifact.

    Attributes:
        name: as the manifest holds it.
        settings: of every measurement.
        lengths: sequence lengths, where the user names none.
        batches: of a model without a dynamic length.
        memory: peak memory as well, each figure in a process of its own.
    """

    name: MeasuredExtent
    settings: Settings
    lengths: tuple[int, ...] = (64, 256, 1024, 4096)
    batches: tuple[int, ...] = (1, 8, 64)
    memory: bool = True

    def on(self, threads: int) -> BenchPlan:
        """Return the same on so many threads."""
        return replace(self, settings=replace(self.settings, threads=threads))

    def record(self) -> MeasurementRecord:
        """Return it as the manifest holds it."""
        return self.settings.record(self.name)


SHORT = BenchPlan(
    "short",
    Settings(warmup=2, repeats=7, seconds=0.5, patience=1.0, longest=1.0),
    lengths=(256, 1024),
    batches=(1, 8),
    memory=False,
)
"""Default of a conversion: medians of seven calls."""

FULL = BenchPlan("full", Settings(seconds=1.0, patience=2.0, longest=2.0))
"""The whole, in the time that a conversion spends."""

THOROUGH = BenchPlan("full", Settings())
"""The whole, in the time that ``linexport bench`` spends."""

EXTENTS: Mapping[str, BenchPlan] = {"short": SHORT, "full": FULL}


class Called:
    """A call that was made once: the outcome, until it is taken, and the seconds it took."""

    def __init__(self, call: Call) -> None:
        start = time.perf_counter()
        self.outcome: Any = call()
        self.seconds = time.perf_counter() - start
        self._call = call

    def __call__(self) -> object:
        """Call again."""
        return self._call()

    def take(self) -> Any:
        """The outcome, which is held no longer."""
        outcome, self.outcome = self.outcome, None
        return outcome


def interleaved(calls: Mapping[str, Call], settings: Settings) -> dict[str, list[float]]:
    """Milliseconds of every counted call, the baselines taking turns.

    Of a ``Called`` that had lost patience then, that call is the only one that counts. A baseline
    that raises is left out; see ``measure`` for its reason.
    """
    with _torch_threads(settings.threads):
        return _interleaved(calls, settings)


def _interleaved(calls: Mapping[str, Call], settings: Settings) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    spent = {n: c.seconds if isinstance(c, Called) else 0.0 for n, c in calls.items()}
    last = {**spent}
    for name, seconds in spent.items():
        if seconds > settings.patience:
            times[name].append(1e3 * seconds)
    for repeat in range(settings.warmup + settings.repeats):
        for name, call in calls.items():
            # Three counted calls if they can be waited for: a median needs them.
            enough = spent[name] > settings.seconds and len(times[name]) >= 3
            if enough or (spent[name] > settings.patience and times[name]):
                continue
            time.sleep(PAUSE)
            begun = time.perf_counter()
            for _ in range(settings.lead_in if settings.lead_in * last[name] <= WAKING else 0):
                call()
            start = time.perf_counter()
            call()
            end = time.perf_counter()
            last[name] = end - start
            spent[name] += end - begun
            warm = repeat >= settings.warmup or spent[name] > settings.seconds
            if warm:
                times[name].append(1e3 * last[name])
    return times


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """PyTorch with so many threads; 0 for its own choice."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(
    calls: Mapping[str, Call | None], reasons: Mapping[str, str], settings: Settings
) -> Times:
    """Median and ninetieth percentile of every runner, or the reason why it has none."""
    why = dict(reasons)
    able: dict[str, Called] = {}
    for name, call in calls.items():
        if call is None:
            continue
        try:
            able[name] = call if isinstance(call, Called) else Called(call)
            able[name].take()
        except Exception as error:
            why[name] = str(error).splitlines()[0][:300] if str(error) else type(error).__name__
    times = interleaved(able, settings)
    row: JsonObject = {}
    for name in RUNNERS:
        record = times.get(name)
        row[f"{name}_ms"] = round(float(np.percentile(record, 50)), 4) if record else None
        row[f"{name}_p90_ms"] = round(float(np.percentile(record, 90)), 4) if record else None
    row["reasons"] = {name: why[name] for name in RUNNERS if name in why and name not in times}
    return Times(**row)


def latency_table(
    lengths: Sequence[int],
    prepare: Callable[[int], Mapping[str, Call | None]],
    reasons: Mapping[str, str],
    settings: Settings,
    batch: int = 1,
) -> list[LatencyRow]:
    """A row per length; ``prepare`` gives the baselines' calls at one length."""
    return [
        LatencyRow(**vars(measure(prepare(length), reasons, settings)), length=length, batch=batch)
        for length in lengths
    ]
