"""A replica: the artifact, its pool and its cache of prefixes. Calls name all that they need."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from linexport.artifact import Artifact, StreamState, load
from linexport.artifact.call_inputs import Arrays
from linexport.artifact.signature import Trust
from linexport.serving.channel import Channel
from linexport.serving.computing import LocalComputing
from linexport.serving.limits import Limits
from linexport.serving.sequence import Outputs, SequenceStep
from linexport.serving.service import Service
from linexport.serving.session import Session
from linexport.serving.task import Feeds
from linexport.serving.text import End, Order, TextEvent
from linexport.system.time_limit import limited

Piece = tuple[Outputs, StreamState | None]

UNLIMITED = 2**31
"""Events that wait here: the gateway takes all at once, and holds its readers to their limit."""


class PieceStep(SequenceStep):
    """A piece of a sequence whose state comes with it, and goes back with its outputs."""

    def __init__(
        self,
        model: Artifact,
        feeds: Feeds,
        channel: Channel[Piece],
        state: StreamState | None,
        keep: bool,
    ) -> None:
        super().__init__(model, feeds, channel, resumes=None, holds=None)
        self._state, self._keep = state, keep

    def state(self) -> StreamState | None:
        return self._state

    def answer(self, session: Session) -> Piece:
        return self.joined(), session.state() if self._keep else None


class ReplicaModel:
    """Computes; every call names what it goes on from.

    Args:
        folder: of the artifact.
        threads: of its runtime.
        limits: of the replica.
        trust: whose artifacts are opened, also when a replica starts again; None for anybody's.
    """

    def __init__(
        self, folder: Path, threads: int, limits: Limits, trust: Trust | None = None
    ) -> None:
        self._limit = ExitStack()
        self._limit.enter_context(limited(limits.time_limit))  # for as long as the process
        key, newer_than = (None, None) if trust is None else (trust.key, trust.newer_than)
        artifact = load(folder, threads=threads, key=key, newer_than=newer_than)
        most = replace(limits, buffer=UNLIMITED)
        self._local = LocalComputing(artifact, most)
        self._service = Service(artifact, self._local, "", most)
        self._service.start()

    def check_health(self) -> None:
        """Raise where nothing is computed any longer; Ray replaces the replica then."""
        if self._local.artifact.states and not self._local.engine.alive:
            raise RuntimeError("the engine has ended")

    async def write(self, order: Order) -> AsyncIterator[list[TextEvent]]:
        """Yield the events of texts, those of a step of the engine together."""
        texts = self._local.write(order, lambda: None)
        left = len(order.texts)
        try:
            while left:
                events = await texts.channel.batch()
                left -= sum(isinstance(event, End) for event in events)
                yield events
        finally:
            texts.cancel()

    async def run(self, feeds: Feeds) -> Outputs:
        """Run whole sequences."""
        return await self._local.run(feeds)

    async def image_inputs(self, ids: np.ndarray, images: Arrays) -> Arrays:
        """Run the vision tower."""
        return await self._local.image_inputs(ids, images)

    async def piece(self, feeds: Feeds, state: StreamState | None, keep: bool) -> Piece:
        """Return the outputs of a piece and, to ``keep``, the state after it."""
        channel: Channel[Any] = self._local.channel()
        step = PieceStep(self._local.artifact, feeds, channel, state, keep)
        found: Piece = await self._local.finish(step, channel)
        return found
