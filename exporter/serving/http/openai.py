"""OpenAI's protocol: /v1/models, /v1/completions, /v1/chat/completions."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from linexport.serving.http.attend import attended
from linexport.serving.http.errors import ProtocolError
from linexport.serving.http.openai_answers import Answer, ChatAnswer
from linexport.serving.http.openai_requests import (
    COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    TextRequest,
    parse,
)
from linexport.serving.http.openai_texts import Plan, Texts, TextStream
from linexport.serving.language import Language
from linexport.serving.parking import new_id
from linexport.serving.service import Service
from linexport.serving.text import Beginning, TextSettings


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
    own = _language(service).defaults
    return TextSettings(asked.sampling(own.sampling), most, asked.stops(own.stops), park=asked.park)


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
    fingerprint = f"fp_{service.manifest.model_sha256[:12]}"
    answer = form(plan.name, service.name, fingerprint, language.tokenizer)
    texts = Texts(request, service, plan, answer)
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
    return TextStream(texts, texts.events(first, asked.include_usage))


ROUTES = [
    Route("/v1/models", models),
    Route("/v1/models/{name:path}", model),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat, methods=["POST"]),
]
