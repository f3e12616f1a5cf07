"""Waiting for an answer while the client waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import Request

Answer = TypeVar("Answer")


class ClientLeftError(Exception):
    """The client closed the connection before its answer was ready."""


async def attended(request: Request, answer: Awaitable[Answer]) -> Answer:
    """Return what is awaited, unless the client leaves first; the body must have been read.

    Raises:
        ClientLeftError: it left; what is awaited was cancelled.
        Exception: what the answer raises.
    """
    working = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeftError
    finally:
        working.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
