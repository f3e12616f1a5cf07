"""Texts of one request to OpenAI's protocol, while they are written: whole, or as events.

    events of the engine  ->  data: {...}  ...  data: [DONE]

However an answer ends (complete, cut off, the client gone), its slots are free afterwards.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from linexport.serving.http.errors import protocol_error
from linexport.serving.http.json_writer import encoded
from linexport.serving.http.openai_answers import Answer
from linexport.serving.service import Service
from linexport.serving.text import Beginning, Delta, End, Order, TextSettings, Withheld

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Plan:
    """A request for texts, checked.

    Attributes:
        name: id of the answer.
        settings: of the texts.
        beginning: of all of them.
        count: number of texts.
        chat: whether it is a conversation's.
    """

    name: str
    settings: TextSettings
    beginning: Beginning
    count: int
    chat: bool

    def order(self) -> Order:
        """Return what is to be written."""
        return Order(self.settings, dict.fromkeys(range(self.count), self.beginning))

    def parked_name(self, index: int) -> str:
        """Return the id under which a text is parked."""
        return self.name if self.count == 1 else f"{self.name}-{index}"


class Texts:
    """The texts of one request, being written.

    Args:
        request: whose client reads them.
        service: that writes them.
        plan: what is written.
        answer: the form they are sent in.
    """

    def __init__(self, request: Request, service: Service, plan: Plan, answer: Answer) -> None:
        self._service, self._plan, self._answer = service, plan, answer
        self._log: dict[str, object] = request.scope["log"]
        self._log["id"] = plan.name
        self._ends: list[End] = []
        self._parked: dict[int, str] = {}
        self._abort = request.scope["state"].get("abort", lambda: None)
        self._withheld: defaultdict[int, Withheld] = defaultdict(Withheld)
        self._texts = service.write(plan.order(), self._abort)

    async def next(self) -> Delta | End:
        """Return the next event; a text that is to be parked has been."""
        event: Delta | End | None = None
        while event is None:
            step = await self._texts.next()
            event = step if isinstance(step, End) else self._withheld[step.index].delta(step)
        if isinstance(event, End):
            self._ends.append(event)
            if event.beginning is not None:
                await self._park(event, event.beginning)
            self._note()
        return event

    async def _park(self, end: End, beginning: Beginning) -> None:
        """Park a text that has ended; one that cannot be is answered all the same."""
        name = self._plan.parked_name(end.index)
        finished = end.reason != "parked"
        settings, chat = self._plan.settings, self._plan.chat
        try:
            await self._service.park(name, beginning, settings, finished=finished, chat=chat)
        except OSError as error:
            log.error("%s was not parked: %s", name, error.strerror or error)
            return
        self._parked[end.index] = name

    async def all(self) -> list[Delta]:
        """Return all pieces when all texts have ended."""
        deltas = []
        while len(self._ends) < self._plan.count:
            event = await self.next()
            if isinstance(event, Delta):
                deltas.append(event)
        return deltas

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """Return the answer that the pieces of ``all`` are; long ones take long."""
        found = self._answer.complete(deltas, self._ends)
        if self._parked:
            found["parked"] = next(iter(self._parked.values()))
        return encoded(found)

    async def events(self, first: Delta | End, include_usage: bool) -> AsyncIterator[bytes]:
        """Yield server-sent events."""
        for piece in self._answer.opening(self._plan.count):
            yield _sse(piece)
        event = first
        try:
            while True:
                yield _sse(self._piece(event))
                if len(self._ends) == self._plan.count:
                    break
                event = await self.next()
        except Exception as error:
            yield _sse(protocol_error(error).body())
            return
        if include_usage:
            yield _sse(self._answer.usage(self._ends))
        yield DONE

    def close(self) -> None:
        """Free the slots, where the texts have not ended."""
        if len(self._ends) < self._plan.count:
            self._service.metrics.cancelled.inc()
            self._texts.cancel()

    def _piece(self, event: Delta | End) -> dict[str, object]:
        if isinstance(event, Delta):
            return self._answer.delta(event)
        name = self._parked.get(event.index)
        found = self._answer.end(event)
        return found if name is None else {**found, "parked": name}

    def _note(self) -> None:
        usage = [end.usage for end in self._ends]
        self._log["prompt_tokens"] = usage[0].prompt
        self._log["completion_tokens"] = sum(u.completion for u in usage)


class TextStream(StreamingResponse):
    """Sends events; however that ends, the slots are free afterwards."""

    def __init__(self, texts: Texts, events: AsyncIterator[bytes]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._texts = texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._texts.close()


def _sse(content: Mapping[str, object]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"
