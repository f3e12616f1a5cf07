"""Refusals before a request is looked at: strangers, pages of other sites, large bodies.

Host              on loopback without a token: this machine's names only (DNS rebinding)
Authorization     bearer token, compared in constant time, where there is one
Origin            none, or this server's: pages of other sites ask for nothing here
body              so many bytes, in so many seconds
"""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from linexport.serving.http.attend import ClientLeftError
from linexport.serving.http.budget import Budget, Charge
from linexport.serving.http.errors import ProtocolError, protocol_error
from linexport.serving.http.tensors import whole_number

OPEN = {"/", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"}
"""Paths that anybody may ask for: they tell nothing of any sequence."""

LOCAL = {"localhost", "127.0.0.1", "[::1]"}


@dataclass(frozen=True)
class Rules:
    """Conditions under which a request is let through.

    Attributes:
        token: that clients must have; None for none.
        hosts: names by which the server may be called; None for any.
        max_body: bytes of a body.
        seconds: in which it must have come.
    """

    token: str | None
    hosts: frozenset[str] | None
    max_body: int
    seconds: float


class Guards:
    """Wraps an application, and gives every error the form of its protocol."""

    def __init__(self, app: ASGIApp, rules: Rules, budget: Budget) -> None:
        self._app, self._rules, self._budget = app, rules, budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        charge = scope["charge"] = self._budget.open()
        try:
            self._check(scope)
            body = _Body(receive, self._rules, charge)
            await self._app(scope, body.receive, watched)
        except ClientLeftError:
            return
        except Exception as error:
            if started:
                raise
            found = protocol_error(error)
            await found.response(scope["path"])(scope, receive, send)
        finally:
            charge.close()

    def _check(self, scope: Scope) -> None:
        headers, rules = Headers(scope=scope), self._rules
        if rules.hosts is not None and _name(headers.get("host", "")) not in rules.hosts:
            raise ProtocolError(421, "This server is not called by that name.", code="wrong_host")
        if rules.token is not None and scope["path"] not in OPEN:
            given = headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, f"Bearer {rules.token}".encode()):
                raise ProtocolError(
                    401,
                    "Found no valid bearer token; send the server's as Authorization: Bearer ...",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != headers.get("host"):
            raise ProtocolError(403, "Pages of other sites are not answered.", code="origin")
        length = whole_number(headers.get("content-length", "0"))
        if length is None or length > rules.max_body:
            raise _too_large(rules.max_body)


class _Body:
    """Counts and times the body of a request."""

    def __init__(self, receive: Receive, rules: Rules, charge: Charge) -> None:
        self._receive, self._rules, self._charge = receive, rules, charge
        self._bytes, self._more = 0, True
        self._end = asyncio.get_running_loop().time() + rules.seconds

    async def receive(self) -> Message:
        """Return the next message; the time limit ends with the body."""
        if not self._more:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._end):
                message = await self._receive()
        except TimeoutError:
            raise ProtocolError(
                408, f"The request took more than {self._rules.seconds:g} s.", code="timeout"
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        size = len(message.get("body", b""))
        self._bytes += size
        self._more = message.get("more_body", False)
        if self._bytes > self._rules.max_body:
            raise _too_large(self._rules.max_body)
        self._charge.take(size, "its body")
        return message


def _too_large(most: int) -> ProtocolError:
    return ProtocolError(413, f"The body is larger than {most} bytes.", code="body_too_large")


def _name(host: str) -> str:
    """Return the name of a Host header, without the port."""
    return host if host.endswith("]") else host.rpartition(":")[0] or host
