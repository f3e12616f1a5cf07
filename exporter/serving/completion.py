"""A text in progress: logits to tokens, tokens to text, until something ends it.

    prompt -> logits -> token -> text -> stop strings -> channel
                 ^--------'

The random numbers, the decoder and the stop strings of a text depend on its tokens alone, so that a
text is put down and taken up again as its tokens and the state of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from linexport.artifact import StreamState
from linexport.artifact.text import draws
from linexport.artifact.text.language_interface import LanguageInterface
from linexport.artifact.text.restrictions import Restrictions
from linexport.artifact.text.sampling import log_probabilities
from linexport.artifact.text.stops import StopStrings, stop_rules
from linexport.artifact.text.tokenizer import Tokenizer
from linexport.serving.channel import Channel
from linexport.serving.engine import Engine, StoppedError
from linexport.serving.metrics import Metrics, Pace
from linexport.serving.session import Session
from linexport.serving.task import Feeds
from linexport.serving.text import (
    Beginning,
    End,
    Order,
    Reason,
    Scored,
    Step,
    TextEvent,
    TextSettings,
    Usage,
)


@dataclass(frozen=True)
class Writer:
    """Everything that texts of one model share."""

    engine: Engine
    model: LanguageInterface
    tokenizer: Tokenizer
    ends: frozenset[int]
    metrics: Metrics
    restrictions: Restrictions = field(default_factory=Restrictions)


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
    logits_to_keep = 1

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
        self._unfed, self._images = list(beginning.unfed), beginning.images
        sampling = replace(settings.sampling, seed=settings.sampling.seed + index)
        self._choose = sampling.chooser(beginning.tokens, skip=len(self._written))
        self._decode = writer.tokenizer.decoder()
        special = writer.tokenizer.special
        self._ends, stops = stop_rules(special, writer.ends, settings.stops)
        self._stops = StopStrings(stops)
        self._decoded = self._shown = 0
        for token in self._written:
            self._shown += len(self._extend(token))
        self._siblings: list[Completion] = []
        self._state = beginning.state
        self._cached = 0
        self._first: np.ndarray | None = None
        self._pace = Pace(writer.metrics, begun=bool(self._written))

    @classmethod
    def of_order(
        cls, writer: Writer, order: Order, channel: Channel[TextEvent]
    ) -> tuple[list[Completion], list[Completion]]:
        """Return the texts of an order, and those to begin with.

        Texts that begin alike have one prompt, computed once: the first has the others follow.
        """
        texts = [cls(writer, order.settings, b, channel, i) for i, b in order.texts.items()]
        first, *others = texts
        if any(text._beginning != first._beginning for text in others):
            return texts, texts
        first._siblings = others
        return texts, [first]

    def state(self) -> StreamState | None:
        return self._state

    def begin(self) -> Feeds | None:
        """Return what the model has not seen; of a text whose prompt is done, the first token."""
        if self._first is None:
            given = {} if self._images is None else self._images.feeds(len(self._unfed))
            return {**self._feeds(self._unfed), **given}
        self._unfed, self._images = [], None
        return self._next(self._first, self.state)

    def receive(self, outputs: Feeds, session: Session) -> Feeds | None:
        """Choose the next token."""
        if session.queued:
            return None
        logits = outputs[self._writer.model.logits][0, -1]
        if not self._cached and session.cached:
            self._cached = session.cached
            self._writer.metrics.cached_tokens.inc(self._cached)
        self._unfed, self._images = [], None
        if self._siblings:
            self._fork(session.state(), logits)
        following = self._next(logits, session.state)
        if following is None:  # the next turn of a conversation begins with this text
            session.remember()
        return following

    def fail(self, error: Exception) -> None:
        self._channel.fail(error)

    def park(self, session: Session | None) -> None:
        """End with what is needed to go on: all tokens that the state does not have.

        Raises:
            StoppedError: the state does not have all images, which are not parked.
        """
        if self._images is not None:
            raise StoppedError("The server is shutting down: send the images to the next one.")
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
        token = self._choose(self._allowed(logits))
        self._pace.token()
        if token in self._ends:
            self._end("stop", state)
            return None
        scored = None if self._settings.logprobs is None else self._scored(token, logits)
        self._written.append(token)
        self._unfed = [token]
        self._give(self._extend(token), token, scored)
        if self._stops.stopped:
            self._end("stop", state)
            return None
        if len(self._written) >= self._settings.max_tokens:
            self._end("length", state)
            return None
        return self._feeds([token])

    def _allowed(self, logits: np.ndarray) -> np.ndarray:
        """Return logits with minus infinity for tokens that may not come here."""
        writer, prompt = self._writer, self._beginning.prompt_tokens
        return writer.restrictions.allowed(logits, prompt, len(self._written), writer.ends)

    def _extend(self, token: int) -> str:
        piece = self._decode(token)
        self._decoded += len(piece)
        return self._stops.feed(piece)

    def _give(self, text: str, token: int | None = None, scored: Scored | None = None) -> None:
        self._shown += len(text)
        self._channel.put(Step(self._index, token, text, self._shown, scored))

    def _scored(self, token: int, logits: np.ndarray) -> Scored:
        found, count = log_probabilities(logits), self._settings.logprobs or 0
        tokens = draws.largest(logits, min(count, len(logits))).tolist() if count else []
        likeliest = sorted(tokens, key=lambda i: (-logits[i], i))
        top = tuple((int(i), float(found[i])) for i in likeliest)
        return Scored(token, float(found[token]), top, self._decoded)

    def _end(self, reason: Reason, state: Callable[[], StreamState | None]) -> None:
        if not self._stops.stopped:
            text = self._stops.feed(self._decode.end())
            self._give(text if self._stops.stopped else text + self._stops.end())
        here = replace(self._here(), state=state()) if self._settings.park else None
        self._finish(reason, here)

    def _here(self) -> Beginning:
        begun = self._beginning
        return replace(
            begun,
            unfed=tuple(self._unfed),
            written=tuple(self._written),
            seen=tuple(sorted(begun.tokens)),
            images=None,
        )

    def _finish(self, reason: Reason, beginning: Beginning | None) -> None:
        usage = Usage(self._beginning.prompt_tokens, len(self._written), self._cached)
        self._channel.put(End(self._index, reason, usage, beginning))
