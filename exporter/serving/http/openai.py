"""OpenAI's protocol: /v1/models, /v1/completions, /v1/chat/completions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from linexport.serving.completion import Beginning, Completion, Delta, End, TextSettings
from linexport.serving.http.attend import attended
from linexport.serving.http.errors import ProtocolError, protocol_error
from linexport.serving.http.openai_answers import Answer, ChatAnswer
from linexport.serving.http.openai_requests import (
    COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    TextRequest,
    parse,
)
from linexport.serving.parking import new_id
from linexport.serving.service import Language, Service

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

    def parked_name(self, index: int) -> str:
        """Return the id under which a text is parked."""
        return self.name if self.count == 1 else f"{self.name}-{index}"


async def models(request: Request) -> Response:
    """List the only model."""
    return JSONResponse({"object": "list", "data": [_model(_service(request))]})


async def model(request: Request) -> Response:
    """Describe the model of a name."""
    service = _service(request)
    _check_model(service, request.path_params["name"])
    return JSONResponse(_model(service))


async def completions(request: Request) -> Response:
    """Continue a prompt."""
    service = _service(request)
    body = await request.body()
    _language(service)
    asked = parse(CompletionRequest, body)
    _check_model(service, asked.model)
    prompt, before = asked.only_prompt(), None
    if asked.resume is not None:
        plan = await _resumed(service, asked, prompt is not None, chat=False)
        if plan.settings.max_tokens:
            return await _answer(request, service, plan, asked)
        before = plan.beginning
    elif prompt is None:
        raise ProtocolError(400, "prompt: expected a text or token ids.", param="prompt")
    beginning = await asyncio.to_thread(service.encode, prompt or (), before, True)
    settings = _settings(service, asked, beginning, asked.max_tokens, COMPLETION_TOKENS)
    settings = replace(settings, logprobs=asked.logprobs)
    plan = Plan(new_id("cmpl"), settings, beginning, asked.n or 1, chat=False)
    return await _answer(request, service, plan, asked)


async def chat(request: Request) -> Response:
    """Continue a conversation."""
    service = _service(request)
    body = await request.body()
    template = _language(service).template
    asked = parse(ChatRequest, body)
    _check_model(service, asked.model)
    if asked.resume is not None:
        plan = await _resumed(service, asked, bool(asked.messages), chat=True)
        return await _answer(request, service, plan, asked)
    if template is None:
        raise ProtocolError(
            400, f"{service.name} has no chat template. Use /v1/completions.", code="no_template"
        )
    if not asked.messages:
        raise ProtocolError(400, "messages: expected one at least.", param="messages")
    prompt = await template.render([message.plain() for message in asked.messages])
    beginning = await asyncio.to_thread(service.encode, prompt, None, False)
    tokens = asked.max_completion_tokens or asked.max_tokens
    settings = _settings(service, asked, beginning, tokens, service.limits.max_tokens)
    settings = replace(settings, logprobs=(asked.top_logprobs or 0) if asked.logprobs else None)
    plan = Plan(new_id("chatcmpl"), settings, beginning, asked.n or 1, chat=True)
    return await _answer(request, service, plan, asked)


def _service(request: Request) -> Service:
    found: Service = request.app.service
    return found


def _model(service: Service) -> dict[str, Any]:
    language = service.language
    return {
        "id": service.name,
        "object": "model",
        "created": 0,
        "owned_by": "linexport",
        "chat": language is not None and language.template is not None,
    }


def _check_model(service: Service, name: str) -> None:
    if name != service.name:
        raise ProtocolError(
            404,
            f"The model {name!r} does not exist; this server has {service.name!r}.",
            code="model_not_found",
            param="model",
        )


def _language(service: Service) -> Language:
    if service.language is None:
        raise ProtocolError(404, f"No texts here: {service.why_no_text}", code="no_text")
    return service.language


def _settings(
    service: Service, asked: TextRequest, beginning: Beginning, tokens: int | None, default: int
) -> TextSettings:
    if asked.park and (service.parking is None or (asked.n or 1) > 1):
        raise ProtocolError(
            400, "park needs a server started with --park DIR, and n of 1.", param="park"
        )
    most = service.fitted(beginning, tokens, default)
    return TextSettings(asked.sampling(), most, asked.stops(), park=asked.park)


async def _resumed(service: Service, asked: TextRequest, has_prompt: bool, *, chat: bool) -> Plan:
    """Return how a parked text goes on; of one that had ended, only where (no tokens)."""
    assert asked.resume is not None
    text, beginning = await service.parked(asked.resume)
    if text.chat != chat:
        raise ProtocolError(400, f"{asked.resume} was parked by the other kind of request.")
    if text.finished and chat:
        raise ProtocolError(400, "That answer is complete: send the conversation's messages.")
    if has_prompt and not text.finished:
        raise ProtocolError(400, f"{asked.resume} is in mid-text: it goes on without a prompt.")
    settings = replace(text.settings(), park=asked.park)
    if text.finished:
        settings = replace(settings, max_tokens=0)
    return Plan(new_id("chatcmpl" if chat else "cmpl"), settings, beginning, 1, chat)


async def _answer(request: Request, service: Service, plan: Plan, asked: TextRequest) -> Response:
    language = _language(service)
    form = ChatAnswer if plan.chat else Answer
    fingerprint = f"fp_{service.artifact.model_sha256[:12]}"
    answer = form(plan.name, service.name, fingerprint, language.tokenizer)
    texts = _Texts(request, service, plan, answer)
    if not asked.stream:
        try:
            return JSONResponse(await attended(request, texts.whole()))
        finally:
            texts.close()
    try:
        # An error before the first token is an answer of its own, not an event in a stream.
        first = await attended(request, texts.next())
    except BaseException:
        texts.close()
        raise
    return _TextStream(texts, texts.events(first, asked.include_usage))


class _Texts:
    """The texts of one request, being written.

    Args:
        request: whose client reads them.
        service: that writes them.
        plan: what is written.
        answer: the form they are sent in.
    """

    def __init__(self, request: Request, service: Service, plan: Plan, answer: Answer) -> None:
        self._service, self._plan, self._answer = service, plan, answer
        self._log: dict[str, Any] = request.scope["log"]
        self._log["id"] = plan.name
        self._ends: list[End] = []
        self._parked: dict[int, str] = {}
        self._abort = request.scope["state"].get("abort", lambda: None)
        self._texts: list[Completion] = []
        self._channel = service.channel(self._cut_off)
        self._texts = service.write(plan.settings, plan.beginning, self._channel, plan.count)

    async def next(self) -> Delta | End:
        """Return the next event; a text that is to be parked has been."""
        event: Delta | End = await self._channel.get()
        if isinstance(event, End):
            self._ends.append(event)
            if event.beginning is not None:
                name = self._plan.parked_name(event.index)
                finished = event.reason != "parked"
                await self._service.park(
                    name,
                    event.beginning,
                    self._plan.settings,
                    finished=finished,
                    chat=self._plan.chat,
                )
                self._parked[event.index] = name
            self._note()
        return event

    async def whole(self) -> dict[str, Any]:
        """Return the answer when all texts have ended."""
        deltas = []
        while len(self._ends) < self._plan.count:
            event = await self.next()
            if isinstance(event, Delta):
                deltas.append(event)
        found = self._answer.complete(deltas, self._ends)
        return {**found, "parked": next(iter(self._parked.values()))} if self._parked else found

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
            self._service.engine.cancel(*self._texts)

    def _piece(self, event: Delta | End) -> dict[str, Any]:
        if isinstance(event, Delta):
            return self._answer.delta(event)
        name = self._parked.get(event.index)
        found = self._answer.end(event)
        return found if name is None else {**found, "parked": name}

    def _note(self) -> None:
        usage = [end.usage for end in self._ends]
        self._log["prompt_tokens"] = usage[0].prompt
        self._log["completion_tokens"] = sum(u.completion for u in usage)

    def _cut_off(self) -> None:
        self._service.engine.cancel(*self._texts)
        self._abort()


class _TextStream(StreamingResponse):
    """Sends events; however that ends, the slots are free afterwards."""

    def __init__(self, texts: _Texts, events: AsyncIterator[bytes]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._texts = texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._texts.close()


def _sse(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


ROUTES = [
    Route("/v1/models", models),
    Route("/v1/models/{name:path}", model),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat, methods=["POST"]),
]
