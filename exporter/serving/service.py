"""The inside of a server: the artifact, its texts, the engine and the limits; no protocol."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from linexport.artifact import Artifact
from linexport.artifact.language_interface import language_interface
from linexport.artifact.tokenizer import Tokenizer, context, end_tokens, find_tokenizer
from linexport.errors import LinexportError, UsageError
from linexport.serving.channel import Channel, Outbox
from linexport.serving.completion import Beginning, Completion, TextEvent, TextSettings, Writer
from linexport.serving.engine import Engine, QueueFullError
from linexport.serving.limits import Limits
from linexport.serving.metrics import Metrics
from linexport.serving.parking import ParkedText, Parking
from linexport.serving.pool import Pool
from linexport.serving.prefix_cache import PrefixCache
from linexport.serving.template import ChatTemplate, find_template, special_tokens

CALLS = 2
"""Calls of the model at a time that are not sequences of the engine."""

CACHE_METRICS = {
    "hits": "Prompts that began with a known prefix.",
    "misses": "Prompts that did not.",
    "states": "States held.",
    "bytes": "Bytes of the states held.",
}


class ContextLengthError(UsageError):
    """A prompt with more tokens than the model, or the server, takes."""


@dataclass(frozen=True)
class Language:
    """The text side of a language model.

    Attributes:
        tokenizer: of its folder, or bytes.
        template: of conversations; None where the folder has none.
        context: tokens that prompt and text may have together.
        ends: tokens that end a text.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    context: int | None
    ends: frozenset[int]


class Service:
    """One artifact, served.

    Attributes:
        artifact: which.
        name: of the model, for clients.
        limits: of the server.
        metrics: of the server.
        language: None where the artifact has no texts.
        why_no_text: the reason for that.
        parking: None where nothing is parked.

    Args:
        park: folder for parked sequences.
    """

    def __init__(
        self, artifact: Artifact, name: str, limits: Limits, park: Path | None = None
    ) -> None:
        self.artifact, self.name, self.limits = artifact, name, limits
        self.metrics = Metrics()
        self.parking = None if park is None else Parking(park, limits.park_mib * 2**20)
        self.why_no_text = ""
        self.language = self._language()
        self.ready = False
        self._engine: Engine | None = None
        self._outbox: Outbox | None = None
        self._calls, self._turns = 0, asyncio.Semaphore(CALLS)

    def _language(self) -> Language | None:
        folder, files = self.artifact.path, self.artifact.verified
        try:
            model = language_interface(self.artifact.manifest)
            if not self.artifact.states:
                raise UsageError(
                    f"{folder} does not stream: {self.artifact.manifest.why_stateless}"
                )
            tokenizer = find_tokenizer(folder, model.vocabulary, files)
        except LinexportError as error:
            self.why_no_text = str(error)
            return None
        found = find_template(folder, files)
        template = None if found is None else ChatTemplate(found, special_tokens(folder, files))
        return Language(tokenizer, template, context(folder, files), end_tokens(folder, files))

    @property
    def engine(self) -> Engine:
        """Return the engine of a model that streams.

        Raises:
            UsageError: it does not stream.
        """
        if self._engine is None:
            raise UsageError(f"{self.name} does not stream: {self.artifact.manifest.why_stateless}")
        return self._engine

    async def start(self) -> None:
        """Begin to take requests."""
        self._outbox = Outbox(asyncio.get_running_loop())
        if self.artifact.states:
            cache = self._cache()
            pool = Pool(
                self.artifact, slots=self.limits.slots, chunk=self.limits.chunk, cache=cache
            )
            self._engine = Engine(
                pool,
                queue=self.limits.queue,
                idle=self.limits.idle_seconds,
                after_step=self._outbox.flush,
            )
            self._engine.start()
            self.metrics.gauge("slots", "Slots.", lambda: pool.slots)
            self.metrics.gauge("sessions", "Slots taken.", lambda: self.engine.sessions)
            self.metrics.gauge("queue", "Requests without a slot.", lambda: self.engine.waiting)
        self.ready = True

    def _cache(self) -> PrefixCache | None:
        """Return a cache of prefixes for a language model, and show what is in it."""
        if self.language is None or not self.limits.cache_mb:
            return None
        cache = PrefixCache(self.limits.cache_mb)
        for name, text in CACHE_METRICS.items():
            read = partial(_statistic, cache, name)
            self.metrics.gauge(f"prefix_cache_{name}", text, read)
        return cache

    async def stop(self) -> None:
        """End what is left: park it where there is a folder for that."""
        self.ready = False
        if self._engine is not None and self._engine.alive:
            await asyncio.to_thread(self._engine.stop, park=self.parking is not None)

    async def close(self) -> None:
        """Stop, and end what belongs to the service."""
        await self.stop()
        if self.language is not None and self.language.template is not None:
            await self.language.template.close()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for the turn of a call that is not a sequence of the engine.

        Raises:
            QueueFullError: too many wait already.
        """
        if self._calls >= self.limits.queue + CALLS:
            raise QueueFullError(f"{self._calls} calls are running or wait. Try again later.", 1)
        self._calls += 1
        try:
            async with self._turns:
                yield
        finally:
            self._calls -= 1

    def channel(self, overflow: Callable[[], None]) -> Channel[Any]:
        """Return a channel from the engine to a reader in this event loop."""
        assert self._outbox is not None
        return Channel(self._outbox, self.limits.buffer, overflow)

    def fitted(self, beginning: Beginning, asked: int | None, default: int) -> int:
        """Return how many tokens a text may have.

        Raises:
            ContextLengthError: the prompt is too long.
            UsageError: more tokens were asked for than the server writes.
        """
        assert self.language is not None
        known = beginning.prompt_tokens + len(beginning.written)
        limit = self.language.context
        if len(beginning.unfed) > self.limits.max_prompt:
            raise ContextLengthError(
                f"The prompt has {len(beginning.unfed)} tokens; this server takes at most "
                f"{self.limits.max_prompt}."
            )
        if limit is not None and known >= limit:
            raise ContextLengthError(
                f"The prompt has {known} tokens; the model was made for {limit}, text included. "
                "Leave out the beginning."
            )
        if asked is not None and asked > self.limits.max_tokens:
            raise UsageError(
                f"max_tokens is {asked}; this server writes at most {self.limits.max_tokens}."
            )
        most = min(default, self.limits.max_tokens) if asked is None else asked
        return most if limit is None else min(most, limit - known)

    def encode(
        self, prompt: str | Sequence[int], before: Beginning | None, special: bool
    ) -> Beginning:
        """Return where a text begins: at a prompt, after a sequence if one is given.

        Raises:
            UsageError: the prompt is empty, or has ids outside the vocabulary.
        """
        assert self.language is not None
        start = before or Beginning((), 0)
        if isinstance(prompt, str):
            prompt = self.language.tokenizer.encode(prompt, special=special and before is None)
        unfed = (*start.unfed, *prompt)
        language_interface(self.artifact.manifest).checked(unfed)
        return replace(start, unfed=unfed, prompt_tokens=start.prompt_tokens + len(prompt))

    def write(
        self, settings: TextSettings, beginning: Beginning, channel: Channel[TextEvent], count: int
    ) -> list[Completion]:
        """Let texts of a prompt be written; ``beginning`` may be in mid-text.

        Raises:
            QueueFullError: no slot is free, and the queue is full.
            StoppedError: the server stops.
            UsageError: more texts than slots.
        """
        assert self.language is not None
        if count > self.limits.slots:
            raise UsageError(f"n is {count}; this server has {self.limits.slots} slots.")
        writer = Writer(
            self.engine,
            language_interface(self.artifact.manifest),
            self.language.tokenizer,
            self.language.ends,
            self.metrics,
        )
        texts = Completion(writer, settings, beginning, channel).repeat(count)
        self.engine.submit(texts[0])
        self.metrics.prompt_tokens.inc(beginning.prompt_tokens)
        return texts

    async def park(
        self, name: str, beginning: Beginning, settings: TextSettings, *, finished: bool, chat: bool
    ) -> None:
        """Keep a sequence under a name.

        Raises:
            OSError: it cannot be written.
        """
        assert self.parking is not None
        text = ParkedText.of(
            self.artifact.model_sha256, beginning, settings, finished=finished, chat=chat
        )
        await asyncio.to_thread(self.parking.save, name, text, beginning.state)
        self.metrics.parked.inc()

    async def parked(self, name: str) -> tuple[ParkedText, Beginning]:
        """Return a parked sequence.

        Raises:
            UsageError: there is none of this name, or it is damaged.
        """
        if self.parking is None:
            raise UsageError("This server parks nothing; start it with --park DIR.")
        text, state = await asyncio.to_thread(self.parking.load, name, self.artifact.model_sha256)
        return text, text.beginning(state)


def _statistic(cache: PrefixCache, name: str) -> float:
    return float(getattr(cache.statistics(), name))


def new_seed() -> int:
    """Return a seed for texts that name none."""
    return secrets.randbits(32)
