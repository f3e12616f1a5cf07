"""Where the model of a service runs: in this process, or in others that do what is here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np

from linexport.artifact import Artifact
from linexport.artifact.call_inputs import Arrays
from linexport.artifact.text.language_interface import language_interface
from linexport.errors import UsageError
from linexport.serving.call_time import in_time
from linexport.serving.channel import Channel, Outbox
from linexport.serving.completion import Completion, Writer
from linexport.serving.engine import Engine, QueueFullError
from linexport.serving.language import Language
from linexport.serving.limits import Limits
from linexport.serving.metrics import Metrics
from linexport.serving.pool import Pool
from linexport.serving.prefix_cache import PrefixCache
from linexport.serving.sequence import Outputs, SequenceStep
from linexport.serving.task import Feeds
from linexport.serving.text import Order, TextEvent

CALLS = 2
"""Calls of the model at a time that are not sequences of the engine."""

CACHE_METRICS = {
    "hits": "Prompts that began with a known prefix.",
    "misses": "Prompts that did not.",
    "states": "States held.",
    "bytes": "Bytes of the states held.",
}


class TextEvents(Protocol):
    """Texts that are being written for one reader."""

    async def next(self) -> TextEvent:
        """Return the next event.

        Raises:
            Exception: with which all of them ended.
        """
        ...

    def cancel(self) -> None:
        """End what has not ended."""
        ...


class Computing(Protocol):
    """Calls of the model that a service makes, in one event loop."""

    def start(self, metrics: Metrics, language: Language | None) -> None:
        """Begin, in the event loop; without a language there are no texts."""
        ...

    async def stop(self, *, park: bool) -> None:
        """End every text: park it, or fail it."""
        ...

    def write(self, order: Order, overflow: Callable[[], None]) -> TextEvents:
        """Let texts be written; ``overflow`` is called when their reader is too slow.

        Raises:
            QueueFullError: no slot is free, and the queue is full.
            StoppedError: the model is being stopped.
        """
        ...

    async def run(self, feeds: Feeds) -> Outputs:
        """Run whole sequences from the beginning."""
        ...

    async def image_inputs(self, ids: np.ndarray, images: Mapping[str, np.ndarray]) -> Arrays:
        """Run the vision tower; see ``Artifact.image_inputs``."""
        ...

    async def piece(self, feeds: Feeds, name: str, starts: bool, ends: bool) -> Outputs:
        """Run the next piece of a sequence; cancelled, it ends the sequence."""
        ...


class LocalTexts:
    """Texts that an engine of this process writes."""

    def __init__(
        self,
        writer: Writer,
        order: Order,
        channel: Callable[[Callable[[], None]], Channel[Any]],
        overflow: Callable[[], None],
    ) -> None:
        self._engine, self._overflow = writer.engine, overflow
        self.channel: Channel[TextEvent] = channel(self._cut_off)
        self._texts, first = Completion.of_order(writer, order, self.channel)
        self._engine.submit(*first)

    async def next(self) -> TextEvent:
        return await self.channel.get()

    def cancel(self) -> None:
        self._engine.cancel(*self._texts)

    def _cut_off(self) -> None:
        self.cancel()
        self._overflow()


class LocalComputing:
    """The model in this process: an engine on a pool, and calls of the model without it.

    Args:
        artifact: that is run.
        limits: of slots, queues and memory.
    """

    def __init__(self, artifact: Artifact, limits: Limits) -> None:
        self.artifact, self._limits = artifact, limits
        self._engine: Engine | None = None
        self._outbox: Outbox | None = None
        self._writer: Writer | None = None
        self._calls, self._turns = 0, asyncio.Semaphore(CALLS)

    @property
    def engine(self) -> Engine:
        """Return the engine of a model that streams.

        Raises:
            UsageError: it does not stream.
        """
        if self._engine is None:
            reason = self.artifact.manifest.why_stateless
            raise UsageError(f"{self.artifact.path.name} does not stream: {reason}")
        return self._engine

    def start(self, metrics: Metrics, language: Language | None) -> None:
        self._outbox = Outbox(asyncio.get_running_loop())
        if not self.artifact.states:
            return
        limits = self._limits
        cache = None if language is None else self._cache(metrics)
        pool = Pool(self.artifact, slots=limits.slots, chunk=limits.chunk or None, cache=cache)
        engine = Engine(
            pool, queue=limits.queue, idle=limits.idle_seconds, after_step=self._outbox.flush
        )
        engine.start()
        metrics.gauge("slots", "Slots.", lambda: pool.slots)
        metrics.gauge("sessions", "Slots taken.", lambda: engine.sessions)
        metrics.gauge("queue", "Requests without a slot.", lambda: engine.waiting)
        self._engine = engine
        if language is not None:
            model = language_interface(self.artifact.manifest)
            texts = language.tokenizer, language.ends, metrics, language.defaults.restrictions
            self._writer = Writer(engine, model, *texts)

    def _cache(self, metrics: Metrics) -> PrefixCache | None:
        """Return a cache of prefixes, and show what is in it."""
        if not self._limits.cache_mb:
            return None
        cache = PrefixCache(self._limits.cache_mb)
        for name, text in CACHE_METRICS.items():
            metrics.gauge(f"prefix_cache_{name}", text, partial(_statistic, cache, name))
        return cache

    async def stop(self, *, park: bool) -> None:
        if self._engine is not None and self._engine.alive:
            await asyncio.to_thread(self._engine.stop, park=park)

    def write(self, order: Order, overflow: Callable[[], None]) -> LocalTexts:
        assert self._writer is not None
        return LocalTexts(self._writer, order, self.channel, overflow)

    async def run(self, feeds: Feeds) -> Outputs:
        async with self._turn():
            with in_time():
                return await asyncio.to_thread(self.artifact.run, feeds)

    async def image_inputs(self, ids: np.ndarray, images: Mapping[str, np.ndarray]) -> Arrays:
        async with self._turn():
            with in_time():
                return await asyncio.to_thread(self.artifact.image_inputs, ids, images)

    async def piece(self, feeds: Feeds, name: str, starts: bool, ends: bool) -> Outputs:
        if starts:
            self.engine.release(name)
        channel = self.channel()
        resumes, holds = None if starts else name, None if ends else name
        step = SequenceStep(self.artifact, feeds, channel, resumes=resumes, holds=holds)
        return await self.finish(step, channel)

    async def finish(self, step: SequenceStep, channel: Channel[Any]) -> Any:
        """Return what a step puts into its channel; cancelled, it cancels the step."""
        self.engine.submit(step)
        try:
            return await channel.get()
        except BaseException:
            self.engine.cancel(step)
            raise

    def channel(self, overflow: Callable[[], None] = lambda: None) -> Channel[Any]:
        """Return a channel from the engine to a reader in the event loop."""
        assert self._outbox is not None
        return Channel(self._outbox, self._limits.buffer, overflow)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Wait for the turn of a call that is not a sequence of the engine.

        Raises:
            QueueFullError: too many wait already.
        """
        if self._calls >= self._limits.queue + CALLS:
            raise QueueFullError(f"{self._calls} calls are running or wait. Try again later.", 1)
        self._calls += 1
        try:
            async with self._turns:
                yield
        finally:
            self._calls -= 1


def _statistic(cache: PrefixCache, name: str) -> float:
    return float(getattr(cache.statistics(), name))
