"""Bodies that come in chunks: a few between two turns of the event loop, and so many altogether.

    events of a connection     ->  AT_ONCE of them, then others have their turns
    connections that go on     ->  one in a turn of the event loop
    chunks of one body         ->  MAX_CHUNKS, then an error
    extensions and trailers    ->  as many bytes and lines as headers, then an error

A chunk has six bytes at least, whatever it holds, and its reader takes the same time for each. The
parser limits what is not complete: it is given ``PART`` bytes at a time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl

AT_ONCE, MAX_CHUNKS = 32, 2**12

PART = 2**14
"""Bytes of a connection that are parsed at a time."""

FRAME = 32
"""Bytes around a chunk: its length, with leading zeros, and the ends of two lines."""


class PiecesError(Exception):
    """A body is in more pieces than are read; the message says so."""


class PieceReader(h11.Connection):
    """A parser that rests after ``AT_ONCE`` pieces, until ``go_on``.

    Attributes:
        rests: whether what came before is not all read.

    Args:
        role: as in h11.
        most_bytes: of headers; of extensions and trailers together.
        most_lines: of trailers.
    """

    def __init__(self, role: Any, most_bytes: int, most_lines: int) -> None:
        super().__init__(role, most_bytes)
        self._most_bytes, self._most_lines = most_bytes, most_lines
        self.rests = False
        self._events = self._chunks = self._around = 0

    def go_on(self) -> None:
        """Read further pieces."""
        self.rests = False

    def receive_data(self, data: bytes) -> None:
        """Take what came."""
        self._around += len(data)
        super().receive_data(data)

    def next_event(self) -> Any:
        """Return the next event; NEED_DATA while it rests.

        Raises:
            PiecesError: see there.
            h11.RemoteProtocolError: the request is not HTTP.
        """
        if self.rests:
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._events = self._chunks = 0
            self._around = len(self.trailing_data[0])
        elif isinstance(event, h11.Data):
            self._events += 1
            self._chunks += event.chunk_start
            self._around -= len(event.data)
            self.rests = self._events % AT_ONCE == 0
        if isinstance(event, h11.EndOfMessage) or self.rests:
            self._check(event)
        return event

    def _check(self, event: Any) -> None:
        if self._chunks > MAX_CHUNKS:
            raise PiecesError(f"The body comes in more than {MAX_CHUNKS} chunks. Send larger ones.")
        around = self._around - len(self.trailing_data[0]) - FRAME * (self._chunks + 1)
        lines = len(event.headers) if isinstance(event, h11.EndOfMessage) else 0
        if around > self._most_bytes or lines > self._most_lines:
            raise PiecesError(
                f"Extensions of chunks and trailers have more than {self._most_bytes} bytes or "
                f"{self._most_lines} lines."
            )


class TurnQueue:
    """Connections that go on with their pieces: one in each turn of the event loop, in order."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()  # the first goes on in the next turn

    def add(self, go_on: Callable[[], None]) -> None:
        """Let a connection go on when its turn has come."""
        self._waiting.append(go_on)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        try:
            self._waiting[0]()
        finally:
            self._waiting.popleft()
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._next)


class HeldFlow(FlowControl):
    """Control of a connection's reading that others cannot resume while it is held.

    Attributes:
        held: whether it is.
    """

    held = False

    def hold(self) -> None:
        """Read nothing until ``release``."""
        self.held = True
        self._transport.pause_reading()

    def release(self) -> None:
        """Read on, unless somebody paused it."""
        self.held = False
        if not self.read_paused:
            self._transport.resume_reading()

    def resume_reading(self) -> None:
        """Read on, or once it is released."""
        if self.held:
            self.read_paused = False
        else:
            super().resume_reading()
