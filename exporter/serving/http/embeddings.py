"""OpenAI's protocol for vectors of texts: /v1/embeddings.

Texts are computed in batches of about one length, one after another; the memory of the largest is
charged to the request before the first.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Literal

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from linexport.artifact.text.embedding import EmbeddedTexts, TextVectors
from linexport.artifact.text.encoder import TooManyTokensError
from linexport.artifact.text.late_interaction import Row
from linexport.serving.http.attend import attended
from linexport.serving.http.budget import READ
from linexport.serving.http.call_cost import HEAD, call_cost
from linexport.serving.http.errors import ProtocolError
from linexport.serving.http.json_reader import ElementError, JsonReader
from linexport.serving.http.json_writer import encoded, largest
from linexport.serving.http.openai import check_model
from linexport.serving.http.openai_requests import Items, Record, Steps, parse
from linexport.serving.http.tensors import InferRequest
from linexport.serving.prompt_length import ContextLengthError, too_long
from linexport.serving.service import Service

TEXTS = 2048
"""Texts of a request, as OpenAI limits them."""

FLOAT = np.dtype("<f4")


class EmbeddingRequest(Record):
    """``POST /v1/embeddings``; ``prompt_name`` is of sentence-transformers."""

    model: str
    input: str | Items[str] | Items[int] | Items[Items[int]]
    dimensions: Annotated[int, Field(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    prompt_name: Annotated[str, Field(max_length=256)] | None = None
    user: str | None = None

    def texts(self) -> Sequence[str | list[int]]:
        """Return each text, or its token ids."""
        one = isinstance(self.input, str) or (self.input and isinstance(self.input[0], int))
        return [self.input] if one else self.input  # type: ignore[list-item,return-value]


async def embeddings(request: Request) -> Response:
    """Return vectors of texts."""
    service: Service = request.app.service
    desk, charge = request.app.desk, request.scope["charge"]
    body = await request.body()
    charge.take(READ * len(body), "what is read of its body")
    vectors = _vectors(service)
    fields = await desk.do(len(body), partial(parse, input=_read_input), EmbeddingRequest, body)
    check_model(service, fields.model)
    vectors.check_size(fields.dimensions)
    texts = fields.texts()
    if not 1 <= len(texts) <= TEXTS:
        raise ProtocolError(
            400, f"input: found {len(texts)} texts; expected 1 to {TEXTS}.", param="input"
        )
    rows = [await asyncio.to_thread(_tokens, service, vectors, fields, text) for text in texts]
    work = EmbeddedTexts(vectors, rows, fields.dimensions)
    size = await _charge(request, service, vectors, fields, work)
    for batch in work.batches:
        feeds = work.feeds(batch)
        work.take(batch, await attended(request, service.computing.run(feeds)))
    content = await desk.do(size, _answer, service.name, fields, work)
    return Response(content, media_type="application/json")


def _vectors(service: Service) -> TextVectors:
    if not service.ready:
        raise ProtocolError(503, "The server is shutting down.")
    if service.vectors is None:
        raise ProtocolError(404, f"No vectors here: {service.why_no_vectors}", code="no_vectors")
    return service.vectors


def _tokens(
    service: Service, vectors: TextVectors, fields: EmbeddingRequest, text: str | list[int]
) -> Row:
    """Return the tokens of a text.

    Raises:
        ContextLengthError: there are more than the server takes, or of token ids the model.
        UsageError: the text has none, or there is no such prompt.
    """
    most = service.limits.max_prompt
    if isinstance(text, str):
        try:
            return vectors.tokens(text, fields.prompt_name, most)
        except TooManyTokensError as error:
            raise ContextLengthError(too_long(error.count, most)) from None
    most = min(most, vectors.settings.longest or most)
    if len(text) > most:
        raise ContextLengthError(too_long(len(text), most))
    if not text:
        raise ProtocolError(400, "input: a text has no tokens.", param="input")
    return Row(text)


async def _charge(
    request: Request,
    service: Service,
    vectors: TextVectors,
    fields: EmbeddingRequest,
    work: EmbeddedTexts,
) -> int:
    """Take the memory of the largest batch and of the answer; returns the bytes of that.

    Raises:
        ProtocolError: there is not so much, or the answer is larger than the server sends.
    """
    charge, limits = request.scope["charge"], service.limits
    texts = sum(len(row.shown) if vectors.by_token else 1 for row in work.rows)
    count = texts * (fields.dimensions or vectors.size)
    size = HEAD * (1 + len(work.rows))
    size += 4 * count * 4 // 3 if fields.encoding_format == "base64" else largest(count, FLOAT)
    if size > limits.max_answer:
        raise ProtocolError(
            413,
            f"The answer would have up to {size:,} bytes; this server sends at most "
            f"{limits.max_answer:,} (--max-answer). Send fewer texts, or ask for base64 or fewer "
            "dimensions.",
            code="answer_too_large",
        )
    charge.take(size, "the answer")
    costs = []
    for batch in work.batches:
        feeds = work.feeds(batch)
        inside = await request.app.desk.do(None, service.memory.bytes, feeds)
        costs.append(call_cost(service.manifest, InferRequest(inputs=[]), feeds, inside).call)
    charge.take(max(costs), "what the model computes")
    return size


def _answer(name: str, fields: EmbeddingRequest, work: EmbeddedTexts) -> bytes:
    as_text = fields.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _base64(vector) if as_text else _nested(vector),
        }
        for index, vector in enumerate(work.found)
    ]
    tokens = sum(map(len, work.rows))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    content: Mapping[str, object] = {"object": "list", "data": data, "model": name, "usage": usage}
    return encoded(content)


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(vector, FLOAT).tobytes()).decode("ascii")


def _nested(vector: np.ndarray) -> object:
    return vector if vector.ndim == 1 else list(vector)


def _read_input(reader: JsonReader, path: Steps) -> object:
    """Read a text, texts, token ids, or lists of these."""
    if reader.next() != "[" or reader.next_inside() not in '"[':
        return reader.value()
    found: list[object] = []
    for i in reader.items():
        if len(found) == TEXTS:
            raise ElementError(f"expected at most {TEXTS} texts", path)
        if reader.next() == '"':
            found.append(reader.string())
            continue
        numbers = reader.numbers((*path, i), booleans=False)
        ids = numbers.array(np.dtype(np.int64))
        if ids is None or len(numbers.lengths) > 1:
            raise ElementError("expected a text, or token ids in one list", (*path, i))
        found.append(ids.tolist())
    return found


ROUTES = [Route("/v1/embeddings", embeddings, methods=["POST"])]
