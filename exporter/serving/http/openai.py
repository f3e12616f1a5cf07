"""OpenAI's protocol: /v1/models, /v1/completions, /v1/chat/completions."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from linexport.serving.http.attend import attended
from linexport.serving.http.budget import READ
from linexport.serving.http.errors import ProtocolError
from linexport.serving.http.openai_answers import Answer, ChatAnswer, largest_answer
from linexport.serving.http.openai_requests import (
    COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    TextRequest,
    parse,
    read_messages,
    read_prompt,
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
    check_model(service, request.path_params["name"])
    return JSONResponse(_model(service))


async def completions(request: Request) -> Response:
    """Continue a prompt."""
    service = _service(request)
    body = await _body(request)
    _language(service)
    reading = partial(parse, prompt=read_prompt(service.limits.max_prompt))
    text_request: CompletionRequest = await request.app.desk.do(
        len(body), reading, CompletionRequest, body
    )
    check_model(service, text_request.model)
    prompt, before = text_request.only_prompt(), None
    if text_request.resume is not None:
        plan = await _resumed(service, text_request, prompt is not None, chat=False)
        if plan.settings.max_tokens:
            return await _answer(request, service, plan, text_request)
        before = plan.beginning
    elif prompt is None:
        raise ProtocolError(400, "prompt: expected a text or token ids.", param="prompt")
    beginning = await asyncio.to_thread(service.encode, prompt or (), before, True)
    settings = _settings(
        service, text_request, beginning, text_request.max_tokens, COMPLETION_TOKENS
    )
    settings = replace(settings, logprobs=text_request.logprobs)
    plan = Plan(new_id("cmpl"), settings, beginning, text_request.n or 1, chat=False)
    return await _answer(request, service, plan, text_request)


async def chat(request: Request) -> Response:
    """Continue a conversation."""
    service = _service(request)
    body = await _body(request)
    template = _language(service).template
    reading = partial(parse, messages=read_messages)
    text_request: ChatRequest = await request.app.desk.do(len(body), reading, ChatRequest, body)
    check_model(service, text_request.model)
    if text_request.resume is not None:
        plan = await _resumed(service, text_request, bool(text_request.messages), chat=True)
        return await _answer(request, service, plan, text_request)
    images = await request.app.desk.do(len(body), _images, service, text_request)
    if template is None:
        raise ProtocolError(
            400, f"{service.name} has no chat template. Use /v1/completions.", code="no_template"
        )
    if not text_request.messages:
        raise ProtocolError(400, "messages: expected one at least.", param="messages")
    prompt = await template.render([message.plain() for message in text_request.messages])
    beginning = await asyncio.to_thread(service.encode, prompt, None, False)
    if images:
        admit = request.scope["charge"].take
        beginning = await service.with_images(beginning, images, admit)
    tokens = text_request.max_completion_tokens or text_request.max_tokens
    settings = _settings(service, text_request, beginning, tokens, service.limits.max_tokens)
    settings = replace(
        settings, logprobs=(text_request.top_logprobs or 0) if text_request.logprobs else None
    )
    plan = Plan(new_id("chatcmpl"), settings, beginning, text_request.n or 1, chat=True)
    return await _answer(request, service, plan, text_request)


async def _body(request: Request) -> bytes:
    """Return the body, once there is room for what is read of it."""
    body = await request.body()
    request.scope["charge"].take(READ * len(body), "what is read of its body")
    return body


def _service(request: Request) -> Service:
    found: Service = request.app.service
    return found


def _model(service: Service) -> dict[str, object]:
    language = service.language
    return {
        "id": service.name,
        "object": "model",
        "created": 0,
        "owned_by": "linexport",
        "chat": language is not None and language.template is not None,
    }


def check_model(service: Service, name: str) -> None:
    """Check that a request names the model of the server.

    Raises:
        ProtocolError: it names another.
    """
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


def _images(service: Service, chat_request: ChatRequest) -> list[bytes]:
    """Return the images of a conversation, as files.

    Raises:
        ProtocolError: there are more than the server takes, they are not in the request, or the
            model takes text alone.
    """
    found, most = chat_request.images(), service.limits.max_images
    if found and service.images is None:
        raise ProtocolError(
            400, f"No images here: {service.why_no_images}", code="no_images", param="messages"
        )
    if len(found) > most:
        raise ProtocolError(
            400,
            f"Found {len(found)} images; this server takes at most {most} in a prompt "
            "(--max-images).",
            code="too_many_images",
            param="messages",
        )
    return [image.content(place) for place, image in found]


def _settings(
    service: Service,
    text_request: TextRequest,
    beginning: Beginning,
    tokens: int | None,
    default: int,
) -> TextSettings:
    if text_request.park and (service.parking is None or (text_request.n or 1) > 1):
        raise ProtocolError(
            400, "park needs a server started with --park DIR, and n of 1.", param="park"
        )
    most = service.fitted(beginning, tokens, default)
    own = _language(service).defaults
    return TextSettings(
        text_request.sampling(own.sampling),
        most,
        text_request.stops(own.stops),
        park=text_request.park,
    )


async def _resumed(
    service: Service, text_request: TextRequest, has_prompt: bool, *, chat: bool
) -> Plan:
    """Return how a parked text goes on; of one that had ended, only where (no tokens)."""
    assert text_request.resume is not None
    text, beginning = await service.parked(text_request.resume)
    if text.chat != chat:
        raise ProtocolError(400, f"{text_request.resume} was parked by the other kind of request.")
    if text.finished and chat:
        raise ProtocolError(400, "That answer is complete: send the conversation's messages.")
    if has_prompt and not text.finished:
        raise ProtocolError(
            400, f"{text_request.resume} is in mid-text: it goes on without a prompt."
        )
    settings = replace(text.settings(), park=text_request.park)
    if text.finished:
        settings = replace(settings, max_tokens=0)
    return Plan(new_id("chatcmpl" if chat else "cmpl"), settings, beginning, 1, chat)


async def _answer(
    request: Request, service: Service, plan: Plan, text_request: TextRequest
) -> Response:
    language = _language(service)
    if not text_request.stream:
        size = largest_answer(plan.settings, plan.count)
        if size > service.limits.max_answer:
            raise ProtocolError(
                413,
                f"The answer would have up to {size:,} bytes; this server sends at most "
                f"{service.limits.max_answer:,} (--max-answer). Ask for fewer tokens, texts or "
                "logprobs, or for a stream.",
                code="answer_too_large",
            )
        request.scope["charge"].take(size, "the answer")
    form = ChatAnswer if plan.chat else Answer
    fingerprint = f"fp_{service.manifest.model_sha256[:12]}"
    answer = form(plan.name, service.name, fingerprint, language.tokenizer)
    texts = Texts(request, service, plan, answer)
    if not text_request.stream:
        try:
            pieces = await attended(request, texts.all())
            content = await request.app.desk.do(size, texts.whole, pieces)
            return Response(content, media_type="application/json")
        finally:
            texts.close()
    try:
        # An error before the first token is an answer of its own, not an event in a stream.
        first = await attended(request, texts.next())
    except BaseException:
        texts.close()
        raise
    return TextStream(texts, texts.events(first, text_request.include_usage))


ROUTES = [
    Route("/v1/models", models),
    Route("/v1/models/{name:path}", model),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat, methods=["POST"]),
]
