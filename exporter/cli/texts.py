"""Texts that ``linexport generate`` writes: prompts, what is shown of them, and their times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from linexport.cli.options import DEFAULT_TOKENS
from linexport.system.json_object import JsonObject

if TYPE_CHECKING:
    from pathlib import Path

    from linexport.artifact import Artifact
    from linexport.artifact.text.continuation import Generation
    from linexport.artifact.text.generating import GenerationRequest
    from linexport.artifact.text.speculation import Draft
    from linexport.artifact.text.stops import StopStrings
    from linexport.artifact.text.tokenizer import Decoder, Tokenizer


@dataclass
class _Text:
    """One text and its prompt.

    Attributes:
        goes_on: the text is shown behind its prompt, not as an answer.
    """

    prompt: str
    ids: list[int]
    images: JsonObject | None
    tokenizer: Tokenizer
    decode: Decoder
    stops: StopStrings
    goes_on: bool
    tokens: list[int] = field(default_factory=list)
    shown: str = ""

    def add(self, token: int) -> str:
        """Append a token; return the text that it makes certain."""
        self.tokens.append(token)
        return self._shown(self.stops.feed(self.decode(token)))

    def end(self) -> str:
        """Return the rest of the text."""
        if self.stops.stopped:
            return ""
        rest = self.stops.feed(self.decode.end())
        return self._shown(rest if self.stops.stopped else rest + self.stops.end())

    def stopped(self, how: Generation) -> str:
        """Return why it ended."""
        count, whole = len(self.tokens), len(self.ids) + len(self.tokens)
        if self.stops.stopped:
            return "stop"
        if count == how.max_tokens or (how.max_length is not None and whole >= how.max_length):
            return "length"
        return "context" if whole == how.context else "end"

    def record(self, how: Generation) -> JsonObject:
        """Return it as JSON."""
        return {
            "prompt": self.prompt,
            "prompt_tokens": len(self.ids),
            "text": self.shown,
            "tokens": self.tokens,
            "stopped": self.stopped(how),
        }

    def _shown(self, piece: str) -> str:
        if piece and not self.shown and self.goes_on:
            piece = self.tokenizer.gap(self.ids, self.tokens) + piece
        self.shown += piece
        return piece


class GeneratedTexts:
    """Texts that are written together.

    Args:
        model: that writes them.
        request: how.
        how: the same, with what the model's files say.
        texts: each with its prompt.
    """

    def __init__(
        self, model: Artifact, request: GenerationRequest, how: Generation, texts: list[_Text]
    ) -> None:
        self._model, self._request, self._how, self._texts = model, request, how, texts
        self._times: list[float] = []

    @classmethod
    def begin(
        cls,
        model: Artifact,
        prompts: Sequence[str],
        request: GenerationRequest,
        system: str | None,
        *,
        chat: bool,
        images: Sequence[Path] = (),
        exact: bool = False,
    ) -> GeneratedTexts:
        """Return texts of which nothing is written.

        Args:
            model: that writes them.
            prompts: one for each text.
            request: how to write them.
            system: the system's message of a conversation, if any.
            chat: prompts are messages of a user.
            images: files of the images in the only prompt.
            exact: see ``Tokenizer.decoder``.

        Raises:
            LinexportError: the model has no texts, or a file of it is damaged; says why.
        """
        from linexport.artifact.text.image_processor import with_pictures
        from linexport.artifact.text.language_interface import language_interface
        from linexport.artifact.text.stops import StopStrings
        from linexport.artifact.text.tokenizer import find_tokenizer

        vocabulary = language_interface(model.manifest).vocabulary
        tokenizer = find_tokenizer(model.path, vocabulary, model.verified)
        how = request.generation(model.path, vocabulary, model.verified)
        if how.max_tokens is None and how.max_length is None:
            request = replace(request, max_tokens=DEFAULT_TOKENS)
            how = replace(how, max_tokens=DEFAULT_TOKENS)
        before = [] if system is None else [{"role": "system", "content": system}]
        texts = []
        for prompt in prompts:
            if chat:
                content = _message(prompt, len(images))
                ids = model.encode_chat([*before, {"role": "user", "content": content}])
            else:
                ids = tokenizer.encode(prompt)
            ids, given = with_pictures(model, ids, images) if images else (ids, None)
            decoder, stops = tokenizer.decoder(exact=exact), StopStrings(how.stops)
            texts.append(_Text(prompt, ids, given, tokenizer, decoder, stops, not chat))
        return cls(model, request, how, texts)

    def write(self, draft: Draft | None, show: Callable[[str], None]) -> None:
        """Write all texts; ``show`` takes the pieces as they come, a prompt that goes on first."""
        written = self._tokens(draft)  # prompts that are refused are so here
        for text in self._texts:
            show(text.prompt if text.goes_on else "")
        self._times = [time.perf_counter()]
        for tokens in written:
            self._times.append(time.perf_counter())
            for text, token in zip(self._texts, tokens, strict=True):
                if token is not None:
                    show(text.add(token))
        for text in self._texts:
            show(text.end())

    def record(self) -> JsonObject:
        """Return the texts as JSON: of one text its fields, of several a list."""
        records = [text.record(self._how) for text in self._texts]
        first, following = self._milliseconds()
        return {
            **(records[0] if len(records) == 1 else {"texts": records}),
            "first_token_ms": round(first, 3),
            "next_token_ms": round(following, 3),
        }

    def whole(self, chat: bool) -> list[str]:
        """Return each text with its prompt; of conversations, the answer alone."""
        return [text.shown if chat else text.prompt + text.shown for text in self._texts]

    def summary(self) -> str:
        """Return a line about counts and times."""
        written = sum(len(text.tokens) for text in self._texts)
        read = sum(len(text.ids) for text in self._texts)
        first, following = self._milliseconds()
        what = "the prompt" if len(self._texts) == 1 else f"{len(self._texts)} prompts"
        full = any(text.stopped(self._how) == "context" for text in self._texts)
        return (
            f"{written} tokens after {read} of {what}: "
            f"{first:.1f} ms to the first, {following:.2f} ms for each further one"
            + (f"; the context of {self._how.context} tokens is full" if full else "")
        )

    def _tokens(self, draft: Draft | None) -> Iterator[tuple[int | None, ...]]:
        settings = vars(self._request)
        if len(self._texts) > 1:
            return self._model.generate_batch([text.ids for text in self._texts], **settings)
        [text] = self._texts
        tokens = self._model.generate(text.ids, **settings, draft=draft, images=text.images)
        return ((token,) for token in tokens)

    def _milliseconds(self) -> tuple[float, float]:
        """Return the time to the first token, and the mean for each further one."""
        start, *ends = self._times
        if not ends:
            return 0.0, 0.0
        return 1e3 * (ends[0] - start), 1e3 * (ends[-1] - ends[0]) / max(1, len(ends) - 1)


def _message(prompt: str, images: int) -> str | list[dict[str, str]]:
    """Return a user's message as templates take it, the images before the text."""
    if not images:
        return prompt
    return [*({"type": "image"} for _ in range(images)), {"type": "text", "text": prompt}]
