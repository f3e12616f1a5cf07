"""Taking connections from a socket, for as long as files for them can be opened.

    a file for each connection, fewer than the system allows  ->  accepted
    none left                                                 ->  one line, and they wait

asyncio's own servers write an error with a traceback for each place in the queue, every second.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import Callable, Sized

log = logging.getLogger(__name__)

RESERVED = 48
"""Files for what is not a connection: the model's, of pipes, parked sequences and logs."""

PAUSE = 0.2
"""Seconds between two looks whether a connection can be taken again."""

_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_GONE = (errno.ECONNABORTED, errno.EPROTO, errno.EPERM, errno.EINTR)


class Acceptor:
    """Takes connections from one socket.

    Args:
        listening: bound; it listens once this runs.
        backlog: connections that the system keeps meanwhile.
        protocol: made for each connection.
        connections: those that are open.
    """

    def __init__(
        self,
        listening: socket.socket,
        backlog: int,
        protocol: Callable[[], asyncio.Protocol],
        connections: Sized,
    ) -> None:
        self._listening, self._protocol, self._connections = listening, protocol, connections
        listening.setblocking(False)
        listening.listen(backlog)
        self._most = most_connections()
        self._waiting = False

    async def run(self) -> None:
        """Take connections until this is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            if len(self._connections) >= self._most:
                await self._wait(f"{len(self._connections)} connections are open")
                continue
            try:
                connection, _ = await loop.sock_accept(self._listening)
            except OSError as error:
                if error.errno in _FULL:
                    await self._wait(error.strerror or str(error))
                elif error.errno not in _GONE:
                    raise
                continue
            self._waiting = False
            try:
                await loop.connect_accepted_socket(self._protocol, connection)
            except OSError as error:  # the client is gone already
                log.info("a connection was not taken: %s", error)
                connection.close()

    async def _wait(self, why: str) -> None:
        if not self._waiting:
            log.warning(
                "%s: further connections wait. Files that this process may open: %d (ulimit -n).",
                *(why, resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
            )
        self._waiting = True
        await asyncio.sleep(PAUSE)


def allow_connections(count: int) -> None:
    """Let this process open files for so many connections, as far as the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + 4 * RESERVED
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def most_connections() -> int:
    """Return how many connections may be open: one at least."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else max(1, soft - RESERVED)
