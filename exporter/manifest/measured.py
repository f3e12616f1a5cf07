"""Records of measurements: latency, decode step and memory, with those of the baselines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from linexport.manifest.placement import PlacementRecord

RUNNERS = ("artifact", "plain_export", "pytorch")
"""The artifact and its baselines: prefixes of the fields below, and keys of ``reasons``."""

MeasuredExtent = Literal["short", "full"]


@dataclass(frozen=True)
class Times:
    """Median and ninetieth percentile of each runner, in milliseconds; None with a reason."""

    artifact_ms: float | None
    artifact_p90_ms: float | None
    plain_export_ms: float | None
    plain_export_p90_ms: float | None
    pytorch_ms: float | None
    pytorch_p90_ms: float | None
    reasons: dict[str, str]

    def median(self, runner: str) -> float | None:
        """Milliseconds of one of ``RUNNERS``."""
        found: float | None = getattr(self, f"{runner}_ms")
        return found

    def p90(self, runner: str) -> float | None:
        """Milliseconds that nine tenths of a runner's calls stayed below."""
        found: float | None = getattr(self, f"{runner}_p90_ms")
        return found


@dataclass(frozen=True)
class DecodeRecord(Times):
    """One token with the states carried over."""


@dataclass(frozen=True)
class LatencyRow(Times):
    """A whole sequence of ``length`` tokens in each row of the batch."""

    length: int
    batch: int


@dataclass(frozen=True)
class ThroughputRow:
    """Prefill or decode of one runner, from a state after ``depth`` tokens.

    Attributes:
        runner: one of ``RUNNERS``.
        test: its name, such as "pp512", or "tg128 @ d8192".
        kind: "pp", tokens in one call, or "tg", one by one.
        tokens: how many.
        depth: tokens before them.
        tokens_per_second: mean of all repeats; None with a reason.
        deviation: standard deviation of the repeats; None for a single one.
        call_ms: median of the calls: time to the first token for "pp", between tokens for "tg".
        call_p99_ms: the ninety-ninth percentile of them.
        reason: why there are no figures.
        provider: the execution provider that ran it, in ONNX Runtime.
    """

    runner: str
    test: str
    kind: Literal["pp", "tg"]
    tokens: int
    depth: int
    tokens_per_second: float | None
    deviation: float | None
    call_ms: float | None
    call_p99_ms: float | None
    reason: str | None = None
    provider: str = "cpu"


@dataclass(frozen=True)
class MemoryRow:
    """Peak megabytes of one run at one length; ``io_mb`` is the size of what goes in and out."""

    length: int
    io_mb: float | None
    artifact_mb: float | None
    plain_export_mb: float | None
    pytorch_mb: float | None
    reasons: dict[str, str]

    def peak(self, runner: str) -> float | None:
        """Megabytes of one of ``RUNNERS``, or of "io"."""
        found: float | None = getattr(self, f"{runner}_mb")
        return found


@dataclass(frozen=True)
class MeasurementRecord:
    """The way times were taken.

    Attributes:
        warmup: calls before the counted ones.
        repeats: counted calls of each runner.
        threads: of every runner; 0 for each one's own choice.
        interleaved: the runners took turns.
        longest_call_seconds: a baseline was not called where one call would take longer.
        placement: the execution provider that ran the artifact; None for the CPU, which always
            runs the baselines.
        extent: "full", or "short": few lengths and calls, and no memory.
    """

    warmup: int
    repeats: int
    threads: int
    interleaved: bool
    longest_call_seconds: float
    placement: PlacementRecord | None = None
    extent: MeasuredExtent = "full"
