"""Events from the engine's thread to readers in an event loop.

    Channel.put  -->  Outbox  --once a step-->  event loop  -->  await channel.get()

A channel holds so many events and no more: a reader that falls further behind is cut off, so that
neither memory nor the other readers suffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Event = TypeVar("Event")


@dataclass(frozen=True)
class _Failure:
    error: Exception


class SlowReaderError(Exception):
    """The reader of a channel fell too far behind."""


class Outbox:
    """Events of one step, handed to the event loop together.

    Args:
        loop: where the readers are.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: list[tuple[Channel[Any], Any]] = []

    def add(self, channel: Channel[Any], event: object) -> None:
        """Keep an event until the step is done."""
        self._events.append((channel, event))

    def flush(self) -> None:
        """Hand over what was added."""
        if not self._events:
            return
        events, self._events = self._events, []
        try:
            self._loop.call_soon_threadsafe(_deliver, events)
        except RuntimeError:  # the loop is closed, and with it every reader
            return


def _deliver(events: list[tuple[Channel[Any], Any]]) -> None:
    for channel, event in events:
        channel.deliver(event)


class Channel(Generic[Event]):
    """Events of one request, from the engine to one reader.

    Args:
        outbox: of the engine.
        size: events that may wait for the reader.
        overflow: called in the event loop, once, when more would.
    """

    def __init__(self, outbox: Outbox, size: int, overflow: Callable[[], None]) -> None:
        self._outbox, self._size, self._overflow = outbox, size, overflow
        self._queue: asyncio.Queue[Event | _Failure] = asyncio.Queue()
        self._cut = False

    def put(self, event: Event) -> None:
        """Send an event; called in the engine's thread."""
        self._outbox.add(self, event)

    def fail(self, error: Exception) -> None:
        """Send an error, which is the last thing that is read."""
        self._outbox.add(self, _Failure(error))

    def deliver(self, event: Event | _Failure) -> None:
        """Take an event over; called in the event loop."""
        if self._cut:
            return
        if self._queue.qsize() >= self._size:
            self._cut, event = True, _Failure(SlowReaderError("The client reads too slowly."))
            self._overflow()
        self._queue.put_nowait(event)

    async def get(self) -> Event:
        """Return the next event.

        Raises:
            Exception: with which the channel ended.
        """
        event = await self._queue.get()
        if isinstance(event, _Failure):
            raise event.error
        return event

    async def batch(self) -> list[Event]:
        """Return the next event and all that came with it.

        Events of one step of the engine come together: no batch has a part of them.

        Raises:
            Exception: with which the channel ended; events before it are returned first.
        """
        events = [await self.get()]
        while not self._queue.empty():
            event = self._queue.get_nowait()
            if isinstance(event, _Failure):
                self._queue.put_nowait(event)
                break
            events.append(event)
        return events
