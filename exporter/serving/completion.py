"""A text in progress: logits to tokens, tokens to text, until something ends it.

    prompt -> logits -> token -> text -> stop strings -> channel
                 ^--------'

The random numbers, the decoder and the stop strings of a text depend on its tokens alone, so that a
text is put down and taken up again as its tokens and the state of the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from linexport.artifact import StreamState
from linexport.artifact.language_interface import LanguageInterface
from linexport.artifact.sampling import Sampling, log_probabilities
from linexport.artifact.tokenizer import Tokenizer
from linexport.serving.channel import Channel
from linexport.serving.engine import Engine, Feeds
from linexport.serving.metrics import Metrics
from linexport.serving.session import Session
from linexport.serving.stops import StopStrings

Reason = Literal["stop", "length", "parked"]


@dataclass(frozen=True)
class TextSettings:
    """How a text is written.

    Attributes:
        sampling: how tokens are chosen.
        max_tokens: of the text.
        stops: strings before which it ends.
        logprobs: likeliest tokens to report at every place; None reports no probabilities.
        park: keep the sequence when the text ends.
    """

    sampling: Sampling
    max_tokens: int
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    park: bool = False


@dataclass(frozen=True)
class Beginning:
    """Where a text begins.

    Attributes:
        unfed: tokens that the model has yet to see.
        prompt_tokens: number of tokens before the text.
        state: after the tokens before ``unfed``; None where there are none.
        written: tokens of the text so far; the last of them may be in ``unfed``.
    """

    unfed: tuple[int, ...]
    prompt_tokens: int
    state: StreamState | None = None
    written: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scored:
    """A token with its probability.

    Attributes:
        token: its id.
        logprob: log of its probability in the softmax of the logits.
        top: the likeliest tokens there with theirs, best first.
        offset: characters of the text before it.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int


@dataclass(frozen=True)
class Delta:
    """A further piece of a text."""

    index: int
    text: str
    tokens: tuple[Scored, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Numbers of tokens."""

    prompt: int
    completion: int
    cached: int


@dataclass(frozen=True)
class End:
    """The end of a text; ``beginning`` is where it would go on, if it is to be parked."""

    index: int
    reason: Reason
    usage: Usage
    beginning: Beginning | None = None


TextEvent = Delta | End


@dataclass(frozen=True)
class Writer:
    """Everything that texts of one model share."""

    engine: Engine
    model: LanguageInterface
    tokenizer: Tokenizer
    ends: frozenset[int]
    metrics: Metrics


@dataclass
class _Pending:
    """Tokens with probabilities whose text is not given out yet."""

    tokens: list[Scored] = field(default_factory=list)

    def until(self, offset: int) -> tuple[Scored, ...]:
        """Take those that begin before a place of the text."""
        ready = [t for t in self.tokens if t.offset < offset]
        self.tokens = self.tokens[len(ready) :]
        return tuple(ready)


class Completion:
    """One text; a task of the engine.

    Args:
        writer: of the model.
        settings: how it is written.
        beginning: where it begins.
        channel: where it goes.
        index: its number among the texts of one request.
    """

    resumes: str | None = None
    holds: str | None = None

    def __init__(
        self,
        writer: Writer,
        settings: TextSettings,
        beginning: Beginning,
        channel: Channel[TextEvent],
        index: int = 0,
    ) -> None:
        self.cancelled = False
        self._writer, self._settings, self._beginning = writer, settings, beginning
        self._channel, self._index = channel, index
        self._written = list(beginning.written)
        self._unfed = list(beginning.unfed)
        self._choose = settings.sampling.chooser(skip=len(self._written))
        self._decode = writer.tokenizer.decoder()
        self._stops = StopStrings(settings.stops)
        self._decoded = self._shown = 0
        self._pending = _Pending()
        for token in self._written:
            self._extend(token)
        self._siblings: list[Completion] = []
        self._state = beginning.state
        self._cached = 0
        self._first: np.ndarray | None = None
        self._last = self._started = time.perf_counter()

    def repeat(self, count: int) -> list[Completion]:
        """Return ``count`` texts of this prompt, this one first; the prompt is computed once."""
        sampling = self._settings.sampling
        for index in range(1, count):
            settings = replace(
                self._settings, sampling=replace(sampling, seed=sampling.seed + index)
            )
            other = Completion(self._writer, settings, self._beginning, self._channel, index)
            self._siblings.append(other)
        return [self, *self._siblings]

    def state(self) -> StreamState | None:
        return self._state

    def begin(self) -> Feeds | None:
        """Return what the model has not seen; of a text whose prompt is done, the first token."""
        if self._first is None:
            return self._feeds(self._unfed)
        self._unfed = []
        return self._next(self._first, self.state)

    def receive(self, outputs: Feeds, session: Session) -> Feeds | None:
        """Choose the next token."""
        if session.queued:
            return None
        logits = outputs[self._writer.model.logits][0, -1]
        if not self._cached and session.cached:
            self._cached = session.cached
            self._writer.metrics.cached_tokens.inc(self._cached)
        self._unfed = []
        if self._siblings:
            self._fork(session.state(), logits)
        following = self._next(logits, session.state)
        if following is None:  # the next turn of a conversation begins with this text
            session.remember()
        return following

    def fail(self, error: Exception) -> None:
        self._channel.fail(error)

    def park(self, session: Session | None) -> None:
        """End with what is needed to go on: all tokens that the state does not have."""
        if session is None:  # it has not begun, or has the first token yet to choose
            self._finish("parked", self._beginning)
            return
        self._unfed = self._unfed[len(self._unfed) - session.queued :]
        self._finish("parked", replace(self._here(), state=session.state()))

    def _fork(self, state: StreamState, logits: np.ndarray) -> None:
        for other in self._siblings:
            other._state, other._first, other._cached = state, logits, self._cached
        siblings, self._siblings = self._siblings, []
        self._writer.engine.follow(*(o for o in siblings if not o.cancelled))

    def _feeds(self, tokens: Sequence[int]) -> Feeds:
        return {self._writer.model.tokens: np.asarray(tokens, np.int64)[None]}

    def _next(self, logits: np.ndarray, state: Callable[[], StreamState | None]) -> Feeds | None:
        """Choose a token, give out its text, and return it to be fed; None at the end."""
        token = self._choose(logits)
        self._measure()
        if token in self._writer.ends:
            self._end("stop", state)
            return None
        self._written.append(token)
        self._unfed = [token]
        if self._settings.logprobs is not None:
            self._pending.tokens.append(self._scored(token, logits))
        text = self._extend(token)
        self._give(text)
        if self._stops.stopped:
            self._end("stop", state)
            return None
        if len(self._written) >= self._settings.max_tokens:
            self._end("length", state)
            return None
        return self._feeds([token])

    def _extend(self, token: int) -> str:
        piece = self._decode(token)
        self._decoded += len(piece)
        return self._stops.feed(piece)

    def _give(self, text: str) -> None:
        self._shown += len(text)
        tokens = self._pending.until(self._shown)
        if text or tokens:
            self._channel.put(Delta(self._index, text, tokens))

    def _measure(self) -> None:
        now = time.perf_counter()
        metrics = self._writer.metrics
        if self._written:
            metrics.between_tokens.observe(now - self._last)
        else:
            metrics.first_token.observe(now - self._started)
        metrics.generated_tokens.inc()
        self._last = now

    def _scored(self, token: int, logits: np.ndarray) -> Scored:
        found, count = log_probabilities(logits), self._settings.logprobs or 0
        likeliest = np.argsort(-found, kind="stable")[:count]
        top = tuple((int(i), float(found[i])) for i in likeliest)
        return Scored(token, float(found[token]), top, self._decoded)

    def _end(self, reason: Reason, state: Callable[[], StreamState | None]) -> None:
        if not self._stops.stopped:
            text = self._stops.feed(self._decode.end())
            self._give(text if self._stops.stopped else text + self._stops.end())
        here = replace(self._here(), state=state()) if self._settings.park else None
        self._finish(reason, here)

    def _here(self) -> Beginning:
        return replace(self._beginning, unfed=tuple(self._unfed), written=tuple(self._written))

    def _finish(self, reason: Reason, beginning: Beginning | None) -> None:
        usage = Usage(self._beginning.prompt_tokens, len(self._written), self._cached)
        self._channel.put(End(self._index, reason, usage, beginning))
