"""Errors in the form of the protocol that the request's path belongs to.

/v2...    {"error": "..."}                                     Open Inference Protocol
else      {"error": {"message", "type", "param", "code"}}      OpenAI
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.exceptions import HTTPException
from starlette.responses import Response

from linexport.artifact.text.template import TemplateError
from linexport.errors import NonFiniteError, ParityError, UsageError
from linexport.serving.call_time import CallTimeError
from linexport.serving.channel import SlowReaderError
from linexport.serving.engine import QueueFullError, StoppedError
from linexport.serving.prompt_length import ContextLengthError
from linexport.system.json_object import JsonObject

log = logging.getLogger(__name__)

LONGEST = 2_000
"""Characters of a message."""

INVALID, FAULT = "invalid_request_error", "server_error"


@dataclass
class ProtocolError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: of HTTP.
        message: what was found, what was expected, what to do next.
        kind: OpenAI's type of error.
        code: OpenAI's word for it.
        param: field of the request.
        headers: of the answer.
    """

    status: int
    message: str
    kind: str = INVALID
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> JsonObject:
        """Return it in OpenAI's form."""
        param = None if self.param is None else self.param[:LONGEST]
        found = {"message": self.text, "type": self.kind, "param": param, "code": self.code}
        return {"error": found}

    @property
    def text(self) -> str:
        """The message, cut where it quotes much of a request."""
        return self.message if len(self.message) <= LONGEST else f"{self.message[:LONGEST]} ..."

    def response(self, path: str) -> Response:
        """Return the answer to a request for a path."""
        content = {"error": self.text} if path.startswith("/v2") else self.body()
        return Response(
            json.dumps(content), self.status, dict(self.headers), media_type="application/json"
        )


def protocol_error(error: Exception) -> ProtocolError:
    """Return an exception as an answer; one that is a fault of the server says nothing of it."""
    match error:
        case ProtocolError():
            return error
        case HTTPException():
            return ProtocolError(error.status_code, f"{error.detail}.", code="no_such_path")
        case QueueFullError():
            headers = {"Retry-After": str(error.retry_after)}
            return ProtocolError(429, str(error), "rate_limit_error", "queue_full", headers=headers)
        case StoppedError():
            return ProtocolError(503, str(error), FAULT, "shutting_down")
        case SlowReaderError():
            return ProtocolError(408, str(error), code="slow_reader")
        case ContextLengthError():
            return ProtocolError(400, str(error), code="context_length_exceeded", param="prompt")
        case CallTimeError():
            return ProtocolError(504, str(error), FAULT, "time_limit")
        case NonFiniteError() | ParityError():
            return ProtocolError(500, str(error), FAULT, "non_finite")
        case UsageError() | TemplateError():
            return ProtocolError(400, str(error))
        case _:
            log.error("a request failed", exc_info=error)
            return ProtocolError(500, "The server failed to answer.", FAULT, "internal_error")
