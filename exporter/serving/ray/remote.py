"""Models in other processes: a text is continued in another one when its process ends.

    write    sends the order and the tokens so far; gets steps            no state is needed
    piece    sends inputs and the state, from Ray's object store;
             gets outputs and the next state                             exactly once, by its state
    run      sends whole sequences; gets outputs

A step that did not arrive was not written: its token is chosen again, by the same random numbers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.serve.handle import DeploymentHandle

from linexport.artifact.call_inputs import Arrays
from linexport.errors import UsageError
from linexport.serving.engine import QueueFullError
from linexport.serving.language import Language
from linexport.serving.limits import Limits
from linexport.serving.metrics import Metrics, Pace
from linexport.serving.ray.survival import LOST, Patience, surviving
from linexport.serving.sequence import Outputs
from linexport.serving.task import Feeds
from linexport.serving.text import End, Order, TextEvent

SESSION: ContextVar[str] = ContextVar("session", default="")
"""The client's name of its session: requests of one session go to one replica."""

SEQUENCES = 1024
"""Sequences of /v2 whose states are kept at a time."""


class RemoteTexts:
    """Texts that a replica writes, and another one if that ends."""

    def __init__(
        self,
        handle: DeploymentHandle,
        order: Order,
        metrics: Metrics,
        ended: Callable[[], None],
    ) -> None:
        self._handle, self._order, self._metrics = handle, order, metrics
        self._written: dict[int, list[int]] = {i: [] for i in order.texts}
        self._paces = {i: Pace(metrics) for i in order.texts}
        self._events: deque[TextEvent] = deque()
        self._patience, self._ended = Patience(), ended
        self._answer = self._send()

    async def next(self) -> TextEvent:
        while not self._events:
            try:
                self._take(await anext(self._answer))
            except LOST as error:
                await self._patience.again(error)
                self._answer = self._send()
        return self._events.popleft()

    def cancel(self) -> None:
        self._answer.cancel()
        self._ended()

    def _send(self) -> Any:
        return self._handle.write.remote(
            self._order.after({i: tuple(tokens) for i, tokens in self._written.items()})
        )

    def _take(self, events: list[TextEvent]) -> None:
        self._patience.progress()
        for event in events:
            if isinstance(event, End):
                del self._written[event.index]
                self._metrics.cached_tokens.inc(event.usage.cached)
            elif event.token is not None:
                self._written[event.index].append(event.token)
                self._paces[event.index].token()
        self._events.extend(events)
        if not self._written:
            self._ended()


@dataclass
class Kept:
    """A sequence between two requests.

    Attributes:
        state: in Ray's object store; None before the first piece.
        used: when, by the monotonic clock.
        busy: whether a piece is being computed.
    """

    state: object = None
    used: float = 0.0
    busy: bool = False


class Remote:
    """The models of a deployment.

    Args:
        handle: of the deployment.
        limits: of the server.
    """

    def __init__(self, handle: DeploymentHandle, limits: Limits) -> None:
        self._handle, self._limits = handle, limits
        self._kept: dict[str, Kept] = {}
        self._texts: set[int] = set()

    def start(self, metrics: Metrics, language: Language | None) -> None:
        self._metrics = metrics
        metrics.gauge("sessions", "Requests for texts that are answered.", lambda: len(self._texts))
        metrics.gauge("sequences", "Sequences of /v2 that are kept.", lambda: len(self._kept))

    async def stop(self, *, park: bool) -> None:
        """Do nothing: Ray lets a gateway's requests finish before it ends the gateway."""

    def write(self, order: Order, overflow: Callable[[], None]) -> RemoteTexts:
        """Let texts be written; Ray's proxy has taken them all before a client is too slow."""
        handle = self._handle.options(session_id=SESSION.get(), stream=True)
        number = id(order)
        self._texts.add(number)
        return RemoteTexts(handle, order, self._metrics, lambda: self._texts.discard(number))

    async def run(self, feeds: Feeds) -> Outputs:
        handle = self._handle.options(session_id=SESSION.get())
        found: Outputs = await surviving(lambda: handle.run.remote(dict(feeds)))
        return found

    async def image_inputs(self, ids: np.ndarray, images: Mapping[str, np.ndarray]) -> Arrays:
        handle = self._handle.options(session_id=SESSION.get())
        found: Arrays = await surviving(lambda: handle.image_inputs.remote(ids, dict(images)))
        return found

    async def piece(self, feeds: Feeds, name: str, starts: bool, ends: bool) -> Outputs:
        if starts:
            self._begin(name)
        kept = self._kept.get(name)
        if kept is None or kept.busy:
            raise UsageError(f"The sequence {name} is not open, or is busy.")
        kept.busy = True
        handle = self._handle.options(session_id=name)
        try:
            outputs, state = await surviving(
                lambda: handle.piece.remote(dict(feeds), kept.state, not ends)
            )
        except BaseException:
            self._end(name, kept)
            raise
        if ends:
            self._end(name, kept)
        else:
            kept.state, kept.used, kept.busy = ray.put(state), time.monotonic(), False
        return dict(outputs)

    def _begin(self, name: str) -> None:
        old = time.monotonic() - self._limits.idle_seconds
        left = [n for n, k in self._kept.items() if not k.busy and k.used < old]
        for one in [*left, name]:
            self._kept.pop(one, None)
        if len(self._kept) >= SEQUENCES:
            raise QueueFullError(f"{len(self._kept)} sequences are open. Try again later.", 1)
        self._kept[name] = Kept(used=time.monotonic())

    def _end(self, name: str, kept: Kept) -> None:
        """Forget a sequence, unless it was begun anew meanwhile."""
        if self._kept.get(name) is kept:
            del self._kept[name]
