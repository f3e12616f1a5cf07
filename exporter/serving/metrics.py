"""Counters and times of a server, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the buckets of times."""


class Metrics:
    """Counters, gauges and histograms of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.first_token = self._seconds(
            "time_to_first_token", "From the request to the first token."
        )
        self.between_tokens = self._seconds(
            "time_between_tokens", "From one token of a text to the next."
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = self._counter("cached_tokens", "Those that were not computed again.")
        self.generated_tokens = self._counter("generated_tokens", "Tokens chosen.")
        self.requests = self._counter("requests", "Answers, by path and status.", "path", "status")
        self.cancelled = self._counter("cancelled", "Requests whose client left or was too slow.")
        self.parked = self._counter("parked", "Sequences written to the folder of --park.")

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a number that is read when the metrics are."""
        Gauge(f"linexport_{name}", text, registry=self.registry).set_function(value)

    def render(self) -> bytes:
        """Return all of them in Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"linexport_{name}", text, labels, registry=self.registry)

    def _seconds(self, name: str, text: str) -> Histogram:
        return Histogram(f"linexport_{name}_seconds", text, buckets=SECONDS, registry=self.registry)


class Pace:
    """Times of the tokens of one text, from now on.

    Args:
        metrics: that they are added to.
        begun: whether the text has tokens already.
    """

    def __init__(self, metrics: Metrics, begun: bool = False) -> None:
        self._metrics, self._begun, self._last = metrics, begun, time.perf_counter()

    def token(self) -> None:
        """Note that a token was chosen."""
        now = time.perf_counter()
        times = self._metrics.between_tokens if self._begun else self._metrics.first_token
        times.observe(now - self._last)
        self._metrics.generated_tokens.inc()
        self._begun, self._last = True, now
