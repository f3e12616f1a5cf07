"""Bodies that come in chunks: a few between two turns of the event loop, and so many altogether.

    events of a connection  ->  AT_ONCE of them, then others have their turns
    chunks of one body      ->  MOST, then an error

A chunk has six bytes at least, whatever it holds, and its reader takes the same time for each.
"""

from __future__ import annotations

from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl

AT_ONCE, MOST = 64, 2**14


class TooManyPiecesError(Exception):
    """A body has more than ``MOST`` pieces."""


class PieceReader(h11.Connection):
    """A parser that rests after ``AT_ONCE`` pieces, until ``go_on``.

    Attributes:
        rests: whether what came before is not all read.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.rests = False
        self._pieces = 0

    def go_on(self) -> None:
        """Read further pieces."""
        self.rests = False

    def next_event(self) -> Any:
        """Return the next event; NEED_DATA while it rests.

        Raises:
            TooManyPiecesError: see there.
            h11.RemoteProtocolError: the request is not HTTP.
        """
        if self.rests:
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._pieces += 1
            self.rests = self._pieces % AT_ONCE == 0
        elif isinstance(event, h11.Request):
            self._pieces = 0
        if self._pieces > MOST:
            raise TooManyPiecesError
        return event


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
