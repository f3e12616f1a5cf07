"""Connections that do not hold the server up.

    no request within so many seconds      -> closed      half-open and idle connections
    nothing taken for so many seconds      -> aborted     clients that do not read
    more header bytes than HEADER_BYTES    -> 400         floods of headers

uvicorn times connections between requests only. A handler finds ``abort`` in its scope's state.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_BYTES = 2**15
SENT_BYTES = 2**16
"""Bytes that the system keeps for a client: with its own size, megabytes of text nobody reads."""


class Connection(H11Protocol):
    """An HTTP/1.1 connection with deadlines."""

    request_seconds: float
    send_seconds: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SENT_BYTES)
        self._waiting = _Deadline(self.loop, transport)
        self._sending = _Deadline(self.loop, transport)
        self.app_state = {**self.app_state, "abort": transport.abort}
        super().connection_made(transport)
        self._waiting.start(self.request_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.stop()
        self._sending.stop()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Stop waiting when all headers of a request are there."""
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._waiting.stop()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._waiting.start(self.request_seconds)
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._sending.start(self.send_seconds)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._sending.stop()
        super().resume_writing()


class _Deadline:
    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._loop, self._transport = loop, transport
        self._timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float) -> None:
        self.stop()
        self._timer = self._loop.call_later(seconds, self._transport.abort)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def connection_class(request_seconds: float, send_seconds: float) -> type[Connection]:
    """Return a class of connections with these deadlines, as uvicorn takes them."""
    members: dict[str, Any] = {"request_seconds": request_seconds, "send_seconds": send_seconds}
    return type("TimedConnection", (Connection,), members)
