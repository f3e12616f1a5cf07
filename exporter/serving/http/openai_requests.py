"""Requests of OpenAI's protocol, as records that are checked.

Fields of OpenAI's that are not implemented are accepted at their neutral value and refused at any
other; unknown fields are refused. Fields of our own: ``top_k``, ``min_p``, ``repetition_penalty``,
and ``park`` and ``resume``, which keep a sequence and continue it. Fields of sampling that are left
out are as the model's ``generation_config.json`` says.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from linexport.artifact.text.sampling import Sampling
from linexport.serving.http.errors import ProtocolError
from linexport.serving.http.json_reader import ElementError, JsonError, JsonReader
from linexport.serving.limits import LONGEST_STOP, MOST_LOGPROBS, STOPS
from linexport.serving.prompt_length import ContextLengthError, too_long
from linexport.serving.service import new_seed
from linexport.system.json_object import JsonObject

COMPLETION_TOKENS = 16
"""Tokens of a text where the request says nothing: OpenAI's default of /v1/completions."""

PARTS = ("text", "image_url")
"""Types of the parts of a message."""

SHOWN = 60
"""Characters of a URL that an error quotes."""

Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]
"""A list of which only the first wrong item is reported."""

Steps = tuple[int | str, ...]
"""Steps to a value."""

Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
Zero = Annotated[float, Field(ge=0, le=0)]
Nothing = Annotated[list[Any], Field(max_length=0)]


class Record(BaseModel):
    """Checked strictly: no other fields, no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Record):
    """How a stream is sent."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class TextRequest(Record):
    """Fields that requests for texts share."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=STOPS)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    park: bool = False
    resume: Annotated[str, Field(max_length=64)] | None = None

    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    def sampling(self, own: Sampling) -> Sampling:
        """Return how tokens are chosen; where nobody says, OpenAI's default temperature is 1.

        Args:
            own: defaults of the model.
        """
        given: JsonObject = {
            "temperature": own.temperature or 1.0 if self.temperature is None else self.temperature,
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "seed": new_seed() if self.seed is None else self.seed % 2**63,
        }
        return replace(own, **{n: value for n, value in given.items() if value is not None})

    def stops(self, own: tuple[str, ...]) -> tuple[str, ...]:
        """Return the stop strings, where there are none those of the model."""
        if self.stop is None:
            return own
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Return whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(TextRequest):
    """``POST /v1/completions``."""

    prompt: str | Items[int] | Items[str] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    echo: Literal[False] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    suffix: Literal[""] | None = None

    def only_prompt(self) -> str | list[int] | None:
        """Return the prompt.

        Raises:
            ProtocolError: there are several.
        """
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise ProtocolError(400, several(len(prompt)), param="prompt")
            return prompt[0]
        return prompt  # type: ignore[return-value]


class TextPart(Record):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ImageUrl(Record):
    """An image, as the data of its URL: nothing is fetched."""

    url: str
    detail: Literal["auto"] | None = None

    def content(self, place: str) -> bytes:
        """Return the image's file.

        Args:
            place: of the URL in the request, for errors.

        Raises:
            ProtocolError: the URL is another, or its data is not base64.
        """
        head, _, content = self.url.partition(",")
        if not head.startswith("data:") or not head.endswith(";base64"):
            raise ProtocolError(
                400,
                f"{place}: found {self.url[:SHOWN]!r}; expected an image in base64, "
                "data:image/png;base64,...: this server fetches nothing.",
                code="invalid_image_url",
                param=place,
            )
        try:
            return base64.b64decode(content, validate=True)
        except ValueError as error:
            raise ProtocolError(
                400, f"{place}: not base64: {error}", code="invalid_base64", param=place
            ) from None


class ImagePart(Record):
    """A part of a message that is an image."""

    type: Literal["image_url"]
    image_url: ImageUrl


class Message(Record):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[Annotated[TextPart | ImagePart, Field(discriminator="type")]] | None = None
    name: str | None = None
    refusal: None = None
    tool_call_id: str | None = None
    tool_calls: Nothing | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _is_known(cls, content: object) -> object:
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in PARTS:
                raise PydanticCustomError(
                    "part",
                    "Found a part of the type {kind}; this server reads {parts}. Leave it out.",
                    {"kind": kind[:64], "parts": " and ".join(PARTS)},
                )
        return content

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError(
                "content", "A message of the role {role} needs content", {"role": self.role}
            )
        return self

    def plain(self) -> JsonObject:
        """Return it as templates take it."""
        found: JsonObject = {"role": self.role, "content": self._plain_content()}
        return found if self.name is None else {**found, "name": self.name}

    def images(self) -> dict[int, ImageUrl]:
        """Return its images, by the number of their part."""
        parts = self.content if isinstance(self.content, list) else []
        return {i: part.image_url for i, part in enumerate(parts) if isinstance(part, ImagePart)}

    def _plain_content(self) -> str | list[dict[str, str]]:
        """Return a text, or parts where one is an image."""
        if not isinstance(self.content, list):
            return self.content or ""
        if not self.images():
            return "".join(part.text for part in self.content if isinstance(part, TextPart))
        return [
            {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
            for part in self.content
        ]


class ResponseFormat(Record):
    """Text, and nothing else."""

    type: Literal["text"]


class ChatRequest(TextRequest):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(max_length=4096, fail_fast=True)] = []
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Nothing | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None

    def images(self) -> list[tuple[str, ImageUrl]]:
        """Return the images of the conversation, each with its place in the request."""
        return [
            (f"messages.{number}.content.{part}.image_url.url", image)
            for number, message in enumerate(self.messages)
            for part, image in message.images().items()
        ]


Request = TypeVar("Request", bound=Record)

Reading = Callable[[JsonReader, Steps], Any]
"""Reads a field that may be large: wrong items end the reading, where a record would list all."""


def parse(kind: type[Request], body: bytes | memoryview, **large: Reading) -> Request:
    """Return the request in a body.

    Args:
        kind: of the request.
        body: JSON.
        large: how fields are read that may be large.

    Raises:
        ProtocolError: the body is not JSON, or not such a request; names the field.
    """
    try:
        reader = JsonReader(body)
        content = read_object(reader, (), **large)
        reader.end()
    except JsonError as error:
        raise ProtocolError(
            400, f"The body is not JSON: {error}, at character {error.place}", code="invalid_json"
        ) from None
    except ElementError as error:
        place = ".".join(map(str, error.path)) or "The body"
        raise ProtocolError(400, f"{place}: {error}", code="invalid_value", param=place) from None
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, _present(first["loc"], content))) or "The body"
    if first["type"] == "extra_forbidden":
        raise ProtocolError(
            400, f"Unrecognized request argument: {place}", code="unknown_parameter", param=place
        )
    raise ProtocolError(400, f"{place}: {first['msg']}", code="invalid_value", param=place)


def read_object(reader: JsonReader, path: Steps, **large: Reading) -> dict[str, object]:
    """Read an object; see ``parse``.

    Raises:
        ElementError: it is something else, or a field is.
        JsonError: it is not JSON.
    """
    if reader.next() != "{":
        found = reader.found()
        if not path:
            reader.value()  # what is not JSON at all is said first
        raise ElementError(f"expected an object; found {found}", path)
    return {
        name: large[name](reader, (*path, name)) if name in large else reader.value()
        for name in reader.fields()
    }


def read_prompt(most: int) -> Reading:
    """Return what reads a prompt: a text, or at most so many token ids."""

    def read(reader: JsonReader, path: Steps) -> Any:
        first = reader.next()
        if first != "[":
            return reader.value() if first in '"n' else _no_prompt(reader, path)
        if reader.next_inside() == '"':
            texts = []
            for i in reader.items():
                if reader.next() != '"':
                    return _no_prompt(reader, (*path, i))
                texts.append(reader.string())
            return texts
        if reader.next_inside() not in "-0123456789[]":
            for i in reader.items():
                _no_prompt(reader, (*path, i))
        found = reader.numbers(path, booleans=False)
        ids = found.array(np.dtype(np.int64))
        if ids is None or len(found.lengths) > 2:
            raise ElementError("expected token ids, integers in one list", path)
        if len(found.lengths) == 2 and found.lengths[0] > 1:
            raise ElementError(several(found.lengths[0]), path)
        if len(ids) > most:
            raise ContextLengthError(too_long(len(ids), most))
        return ids.tolist()

    return read


def read_messages(reader: JsonReader, path: Steps) -> object:
    """Read the messages of a conversation."""
    if reader.next() != "[":
        return reader.value()
    return [read_object(reader, (*path, i), content=_read_content) for i in reader.items()]


def _read_content(reader: JsonReader, path: Steps) -> object:
    if reader.next() != "[":
        return reader.value()
    parts = []
    for i in reader.items():
        if reader.next() != "{":
            raise ElementError(
                f"expected a part, an object with type and text; found {reader.found()}", (*path, i)
            )
        parts.append(reader.value())
    return parts


def _no_prompt(reader: JsonReader, path: Steps) -> NoReturn:
    raise ElementError(f"expected a text or token ids; found {reader.found()}", path)


def several(count: int) -> str:
    """Return in words that a request has several prompts."""
    return f"Found {count} prompts; expected one a request."


def _present(location: tuple[int | str, ...], value: object) -> list[int | str]:
    """Return the steps of an error's location that a body has, without names of alternatives."""
    kept: list[int | str] = []
    for step in location:
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int):
            value = value[step]
        else:
            continue
        kept.append(step)
    return kept
