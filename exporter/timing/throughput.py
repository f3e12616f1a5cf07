"""Speed of a model that streams, in the words of its field.

    pp512            prefill: 512 tokens in one call, tokens a second
    tg128            decode: 128 tokens one by one
    ... @ d8192      the same after 8,192 tokens: with a recurrent state, decode does not slow down
    time to first token, time between tokens   of tg after pp

A baseline without a state runs all tokens so far again for each token; so it is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from linexport.errors import UsageError
from linexport.graph import dims
from linexport.manifest.measured import ThroughputRow
from linexport.timing.baselines import Bench

CHUNK = 2048
"""Tokens of one call on the way to a depth."""

PREFIX_CALLS = 3
"""Tokens that a baseline without a state is timed on: each is a whole run."""


@dataclass(frozen=True)
class Workload:
    """Lengths and depths to measure.

    Attributes:
        prefill: tokens of each prompt.
        decode: tokens written after each.
        depths: tokens before either.
        repeats: of every measurement.
    """

    prefill: tuple[int, ...] = (512,)
    decode: tuple[int, ...] = (128,)
    depths: tuple[int, ...] = (0,)
    repeats: int = 5

    @property
    def tests(self) -> list[tuple[str, int, int]]:
        """Kind, tokens and depth of every test."""
        return [
            (kind, tokens, depth)
            for depth in self.depths
            for kind, counts in (("pp", self.prefill), ("tg", self.decode))
            for tokens in counts
        ]


def throughput(bench: Bench, work: Workload) -> list[ThroughputRow]:
    """Measure every test of a workload on the artifact and its baselines.

    Args:
        bench: the artifact and its baselines, after ``export_plainly``.
        work: what is measured.

    Returns:
        A row for each test and runner, in tokens a second and milliseconds a call.

    Raises:
        UsageError: the artifact does not stream, or a length is not among those it takes.
    """
    sequence = dims.sequence(bench.tested.dims)
    if not bench.tested.states or sequence is None:
        raise UsageError(
            "pp and tg are measured of models that stream, and this one does not. Without "
            "--prefill, --decode and --depth, whole sequences are measured."
        )
    limits = bench.tested.dims[sequence]
    for _, tokens, depth in work.tests:
        wrong = [n for n in (1, tokens, depth + tokens) if not limits.allows(n)]
        if wrong:
            most = "any number" if limits.max is None else limits.max
            raise UsageError(f"{wrong[0]} tokens: the model takes {limits.min} to {most}.")
    rows = [
        _row(runner, kind, tokens, depth, *_measured(bench, runner, kind, tokens, depth, work))
        for kind, tokens, depth in work.tests
        for runner in ("artifact", "plain_export", "pytorch")
    ]
    provider = bench.tested.execution.provider
    return [replace(r, provider=provider) if r.runner == "artifact" else r for r in rows]


def _measured(
    bench: Bench, runner: str, kind: str, tokens: int, depth: int, work: Workload
) -> tuple[list[list[float]], str | None]:
    """Return the seconds of every call of every repeat, or the reason why there are none."""
    if runner == "artifact":
        run = _stateful(bench, kind, tokens, depth)
    else:
        reason = bench.reasons.get(runner)
        if reason is not None:
            return [], reason
        length = depth + (tokens if kind == "pp" else 1)
        call = bench.whole(runner, length)
        try:
            seconds = _timed(call)
        except Exception as error:
            return [], str(error).splitlines()[0][:200]
        if seconds > bench.settings.longest:
            return [], f"not repeated: one call over {length} tokens takes {seconds:.0f} s"
        calls = 1 if kind == "pp" else PREFIX_CALLS

        def run() -> list[float]:
            return [_timed(call) for _ in range(calls)]

    run()
    return [run() for _ in range(work.repeats)], None


def _stateful(bench: Bench, kind: str, tokens: int, depth: int) -> Callable[[], list[float]]:
    """Return a run of one test from the state at its depth, which is computed once."""
    states, session = bench.tested.states, bench.opened()
    state = bench.state()
    for start in range(0, depth, CHUNK):
        outputs = session.run({**bench.fed(min(CHUNK, depth - start)), **state})
        state = {s.past: outputs[s.present] for s in states}
    prompt, token = bench.fed(tokens), bench.fed(1)

    def prefill() -> list[float]:
        return [_timed(lambda: session.run({**prompt, **state}))]

    def decode() -> list[float]:
        held, seconds = dict(state), []
        for _ in range(tokens):
            start = time.perf_counter()
            outputs = session.run({**token, **held})
            seconds.append(time.perf_counter() - start)
            held = {s.past: outputs[s.present] for s in states}
        return seconds

    return prefill if kind == "pp" else decode


def _row(
    runner: str,
    kind: str,
    tokens: int,
    depth: int,
    repeats: Sequence[Sequence[float]],
    reason: str | None,
) -> ThroughputRow:
    each = [tokens / s[0] if kind == "pp" else len(s) / sum(s) for s in repeats]
    calls = [1e3 * s for one in repeats for s in one]
    return ThroughputRow(
        runner=runner,
        test=f"{kind}{tokens}" + (f" @ d{depth}" if depth else ""),
        kind="pp" if kind == "pp" else "tg",
        tokens=tokens,
        depth=depth,
        tokens_per_second=round(statistics.fmean(each), 3) if each else None,
        deviation=round(statistics.stdev(each), 3) if len(each) > 1 else None,
        call_ms=round(float(np.median(calls)), 4) if calls else None,
        call_p99_ms=round(float(np.percentile(calls, 99)), 4) if calls else None,
        reason=reason,
    )


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
