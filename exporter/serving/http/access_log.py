"""One line of JSON on standard error for every answer.

    {"time", "client", "method", "path", "status", "seconds", "bytes", ...}

Handlers add ``id``, ``prompt_tokens`` and ``completion_tokens``. No line has anything of a text, a
query or a header.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from linexport.system.json_object import JsonObject

Count = Callable[[str, int], None]


def write_line(content: Mapping[str, object]) -> None:
    """Write a line."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    line = json.dumps({"time": now, **content})
    sys.stderr.write(line.replace("\x7f", "\\u007f") + "\n")  # the one that JSON leaves


class AccessLog:
    """Wraps an application.

    Args:
        app: the application.
        count: called with the path, as it is routed, and the status of every answer.
    """

    def __init__(self, app: ASGIApp, count: Count) -> None:
        self._app, self._count = app, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and write its line."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, sent = time.perf_counter(), 0, 0
        scope.setdefault("state", {})
        noted: JsonObject = {}
        scope["log"] = noted

        async def watched(message: Message) -> None:
            nonlocal status, sent
            status = message.get("status", status)
            sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            client = scope.get("client")
            route = scope.get("route")
            self._count(getattr(route, "path", "other"), status)
            write_line(
                {
                    "client": client[0] if client else None,
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "seconds": round(time.perf_counter() - started, 4),
                    "bytes": sent,
                    **noted,
                }
            )


class JsonHandler(logging.Handler):
    """Writes messages of the library and of the web server as such lines."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one."""
        content = {"level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            content["error"] = logging.Formatter().formatException(record.exc_info)
        write_line(content)
