"""Connections that do not hold the server up.

    no request within so many seconds      -> closed      half-open and idle connections
    nothing taken for so many seconds      -> aborted     clients that do not read
    more headers than HEADER_BYTES         -> 400         floods of headers
    more pieces of a body than are read    -> 400         floods of chunks, extensions, trailers

uvicorn times connections between requests only. A handler finds ``abort`` in its scope's state.
"""

from __future__ import annotations

import asyncio
import socket

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from linexport.serving.http.pieces import PART, HeldFlow, PieceReader, PiecesError, TurnQueue

HEADER_BYTES = 2**15
HEADERS = 200
"""Bytes, and lines, of the headers of a request."""

TOO_MANY_HEADERS = f"The headers have more than {HEADER_BYTES} bytes or {HEADERS} lines."

SENT_BYTES = 2**16
"""Bytes that the system keeps for a client: with its own size, megabytes of text nobody reads."""


def _fits(data: bytes) -> bool:
    """Return whether the headers that data begin with are within their limits."""
    head = data[: HEADER_BYTES + 1]
    ends = [place for end in (b"\r\n\r\n", b"\n\n") if (place := head.find(end)) >= 0]
    own = min(ends, default=len(head))
    return own <= HEADER_BYTES and head.count(b"\n", 0, own) <= HEADERS


class Connection(H11Protocol):
    """An HTTP/1.1 connection with deadlines."""

    request_seconds: float
    send_seconds: float
    turns: TurnQueue
    conn: PieceReader
    flow: HeldFlow

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SENT_BYTES)
        self._waiting = _Deadline(self.loop, transport)
        self._sending = _Deadline(self.loop, transport)
        self.app_state = {**self.app_state, "abort": transport.abort}
        super().connection_made(transport)
        self.conn = PieceReader(h11.SERVER, HEADER_BYTES, HEADERS)
        self._unread = bytearray()
        self.flow = HeldFlow(transport)
        self._waiting.start(self.request_seconds)

    def data_received(self, data: bytes) -> None:
        """Read what came, unless it is the beginning of more headers than are read.

        The parser has a limit for headers that are not complete, and takes any that are.
        """
        self._unread += data
        self._read()

    def _read(self) -> None:
        while self._unread and not self.conn.rests and not self.transport.is_closing():
            part = bytes(self._unread[:PART])
            del self._unread[:PART]
            waiting = self.conn.their_state is h11.IDLE
            if waiting and not _fits(self.conn.trailing_data[0] + part):
                self._refuse(TOO_MANY_HEADERS)
                return
            super().data_received(part)

    def _refuse(self, content: str) -> None:
        head = (
            "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n"
            f"Content-Type: text/plain; charset=utf-8\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self.transport.write(f"{head}{content}".encode())
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.stop()
        self._sending.stop()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle what came, in parts; stop waiting when all headers of a request are there.

        A body that goes on after the answer is waited for like the next request.
        """
        try:
            super().handle_events()
        except PiecesError as error:
            if self.conn.our_state is h11.SEND_RESPONSE:
                self._refuse(str(error))
            else:  # the request has its answer
                self.transport.close()
        if self.conn.rests and not self.flow.held:
            self.flow.hold()
            self.turns.add(self._go_on)
        if self.conn.our_state in (h11.SEND_RESPONSE, h11.SEND_BODY):
            self._waiting.stop()

    def _go_on(self) -> None:
        """Handle the next part; it was held when the loop had its turn."""
        self.conn.go_on()
        self.flow.release()
        if not self.transport.is_closing():
            self.handle_events()
            self._read()

    def on_response_complete(self) -> None:
        """Wait for the next request; one that came already has headers of its own."""
        self._waiting.start(self.request_seconds)
        if self.conn.their_state is h11.DONE and not _fits(self.conn.trailing_data[0]):
            self._refuse(TOO_MANY_HEADERS)
            return
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
    members: dict[str, object] = {"request_seconds": request_seconds, "send_seconds": send_seconds}
    members["turns"] = TurnQueue()
    return type("TimedConnection", (Connection,), members)
