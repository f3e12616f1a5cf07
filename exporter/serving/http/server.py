"""The server: a socket, the application on it, and an orderly end.

SIGTERM, Ctrl-C -> no new requests -> texts finish within the grace period -> the rest is
parked, or ended with an error -> connections close -> exit code 0
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn

from linexport.errors import EnvironmentProblemError
from linexport.serving.http.accepting import Acceptor, allow_connections
from linexport.serving.http.access_log import JsonHandler
from linexport.serving.http.application import Application
from linexport.serving.http.connection import HEADER_BYTES, connection_class
from linexport.serving.http.guards import LOCAL, Rules
from linexport.serving.service import Service

BACKLOG = 128
TURN = 0.0005
"""Seconds that one thread of Python may take from the others, 0.005 if not set: the event loop
waits for a turn whenever it reads from a socket, many times for each answer."""

LAST_SECONDS = 5
"""Seconds for connections to take what is left to send, after the grace period."""


@dataclass(frozen=True)
class Address:
    """Where the server listens, and who may ask.

    Attributes:
        host: an address or a name of this machine.
        port: 0 for any that is free.
        token: that clients must send; None for none.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None

    @property
    def local(self) -> bool:
        """Return whether only this machine can reach it."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


class Server(uvicorn.Server):
    """uvicorn's server, which ends or parks texts when it is stopped.

    Args:
        service: what it serves.
        address: where.
        started: called when connections are taken.
    """

    def __init__(
        self, service: Service, address: Address, started: Callable[[], None] = lambda: None
    ) -> None:
        limits = service.limits
        hosts = frozenset({*LOCAL, address.host}) if address.local and not address.token else None
        rules = Rules(address.token, hosts, limits.max_body, limits.request_seconds)
        super().__init__(
            uvicorn.Config(
                Application(service, rules),
                http=connection_class(limits.request_seconds, limits.send_seconds),
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                h11_max_incomplete_event_size=HEADER_BYTES,
                limit_concurrency=limits.connections,
                timeout_keep_alive=limits.request_seconds,
                timeout_graceful_shutdown=limits.grace_seconds + LAST_SECONDS,
                backlog=BACKLOG,
            )
        )
        self._service, self._announce = service, started
        self._accepting: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take connections."""
        await super().startup(sockets=[])  # all but that
        allow_connections(self._service.limits.connections)
        for bound in sockets or ():
            acceptor = Acceptor(bound, BACKLOG, self._protocol, self.server_state.connections)
            self._accepting.append(asyncio.create_task(acceptor.run()))
        self._announce()

    def _protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let texts finish, then end what is left."""
        self._service.ready = False
        for accepting in self._accepting:
            accepting.cancel()
        ending = asyncio.create_task(self._end_texts())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_texts(self) -> None:
        await asyncio.sleep(self._service.limits.grace_seconds)
        await self._service.stop()


def listen(address: Address) -> socket.socket:
    """Return a socket that is bound.

    Raises:
        EnvironmentProblemError: the address is not this machine's, or is taken.
    """
    try:
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address.host, address.port))
    except OSError as error:
        raise EnvironmentProblemError(
            f"Cannot listen on {address.host} port {address.port}: {error.strerror}. Choose others "
            "with --host and --port."
        ) from None
    return bound


def serve(service: Service, address: Address, started: Callable[[str], None]) -> None:
    """Serve until a signal comes.

    Args:
        service: what is served.
        address: where.
        started: called with the URL, once it is answered.

    Raises:
        EnvironmentProblemError: the address cannot be used.
    """
    bound = listen(address)
    for name in ("linexport.serving", "uvicorn"):
        logger = logging.getLogger(name)
        logger.addHandler(JsonHandler(logging.INFO if name != "uvicorn" else logging.WARNING))
        logger.propagate = False
    host, port = bound.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    sys.setswitchinterval(TURN)
    server = Server(service, address, lambda: started(url))
    try:
        server.run([bound])
    except KeyboardInterrupt:
        if not server.should_exit:  # a signal before there was anything to end in an orderly way
            raise
