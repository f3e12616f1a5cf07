"""Answers of OpenAI's protocol: pieces of texts, and whole ones."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from linexport.artifact.text.tokenizer import UNFINISHED, Tokenizer
from linexport.serving.text import Delta, End, Scored, TextSettings, Usage
from linexport.system.json_object import JsonObject

HEAD, TOKEN, REPORTED = 2**11, 32, 160
"""Bytes of a response: without its texts; of a token's text; of a token with its probability."""


@dataclass
class Answer:
    """One request's answer, in the form of /v1/completions.

    Attributes:
        name: id of the answer.
        model: its name.
        fingerprint: which weights wrote it.
        tokenizer: gives the texts of tokens.
    """

    name: str
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))

    whole = piece = "text_completion"

    def opening(self, count: int) -> list[dict[str, object]]:
        """Return the pieces that come before any text."""
        return []

    def delta(self, delta: Delta) -> JsonObject:
        """Return a piece of a stream."""
        return self._object(self.piece, [self._choice(delta.index, delta.text, delta.tokens, None)])

    def end(self, end: End) -> JsonObject:
        """Return the last piece of a text."""
        return self._object(self.piece, [self._choice(end.index, "", (), end.reason)])

    def usage(self, ends: Sequence[End]) -> dict[str, object]:
        """Return the piece with the numbers of tokens."""
        return {**self._object(self.piece, []), "usage": usage([end.usage for end in ends])}

    def complete(self, deltas: Sequence[Delta], ends: Sequence[End]) -> dict[str, object]:
        """Return whole texts."""
        choices, pieces = [], defaultdict[int, list[Delta]](list)
        for delta in deltas:
            pieces[delta.index].append(delta)
        for end in sorted(ends, key=lambda e: e.index):
            own = pieces[end.index]
            text = "".join(d.text for d in own)
            tokens = [t for d in own for t in d.tokens]
            choices.append(self._whole(end, text, tokens))
        return {**self._object(self.whole, choices), "usage": usage([e.usage for e in ends])}

    def _object(self, kind: str, choices: list[dict[str, object]]) -> dict[str, object]:
        return {
            "id": self.name,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }

    def _choice(
        self, index: int, text: str, tokens: Sequence[Scored], reason: str | None
    ) -> dict[str, object]:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(tokens),
            "finish_reason": reason,
        }

    def _whole(self, end: End, text: str, tokens: Sequence[Scored]) -> dict[str, object]:
        return self._choice(end.index, text, tokens, end.reason)

    def _logprobs(self, tokens: Sequence[Scored]) -> dict[str, object] | None:
        if not tokens:
            return None
        texts = self.tokenizer.token_text
        return {
            "tokens": [texts(t.token) for t in tokens],
            "token_logprobs": [t.logprob for t in tokens],
            # Tokens whose bytes are not a character share a text: the likeliest is named.
            "top_logprobs": [{texts(i): p for i, p in reversed(t.top)} for t in tokens],
            "text_offset": [t.offset for t in tokens],
        }


class ChatAnswer(Answer):
    """One request's answer, in the form of /v1/chat/completions."""

    whole, piece = "chat.completion", "chat.completion.chunk"

    def opening(self, count: int) -> list[dict[str, object]]:
        delta = {"role": "assistant", "content": ""}
        return [
            self._object(self.piece, [{"index": i, "delta": delta, "finish_reason": None}])
            for i in range(count)
        ]

    def _choice(
        self, index: int, text: str, tokens: Sequence[Scored], reason: str | None
    ) -> dict[str, object]:
        delta = {"content": text} if reason is None else {}
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(tokens),
            "finish_reason": reason,
        }

    def _whole(self, end: End, text: str, tokens: Sequence[Scored]) -> dict[str, object]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {
            "index": end.index,
            "message": message,
            "logprobs": self._logprobs(tokens),
            "finish_reason": end.reason,
        }

    def _logprobs(self, tokens: Sequence[Scored]) -> dict[str, object] | None:
        if not tokens:
            return None
        content = [
            {
                **self._token(t.token, t.logprob),
                "top_logprobs": [self._token(i, p) for i, p in t.top],
            }
            for t in tokens
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> JsonObject:
        text = self.tokenizer.token_text(token)
        whole = UNFINISHED not in text
        return {
            "token": text,
            "logprob": logprob,
            "bytes": list(text.encode()) if whole else None,
        }


def largest_answer(settings: TextSettings, count: int) -> int:
    """Return the most bytes of an answer: tokens of usual length, and their probabilities."""
    reported = 0 if settings.logprobs is None else 1 + settings.logprobs
    return HEAD + count * settings.max_tokens * (TOKEN + REPORTED * reported)


def usage(numbers: Sequence[Usage]) -> dict[str, object]:
    """Return the numbers of tokens of one prompt and its texts."""
    prompt, cached = numbers[0].prompt, numbers[0].cached
    completion = sum(n.completion for n in numbers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
