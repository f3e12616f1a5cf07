"""Texts that grow by a token at a time, until something ends each of them.

    prompts -> logits (B, V) -> a token of each row -> logits (B, V) -> ...

A row ends by a token of its model, by its length, or with the token that completes a stop string.
The others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from linexport.artifact.text.restrictions import NGrams, Restrictions
from linexport.artifact.text.sampling import Sampling
from linexport.artifact.text.stops import StopStrings
from linexport.artifact.text.tokenizer import Decoder
from linexport.errors import UsageError

END = -1
"""In the place of a token: the text has ended."""


@dataclass(frozen=True)
class Generation:
    """How texts are written, and what ends them.

    Attributes:
        sampling: how tokens are chosen; text i of a batch has the seed plus i.
        ends: tokens that end a text and are not part of it.
        stops: strings that end a text.
        decoder: returns a new decoder; called only where there are ``stops``.
        max_tokens: of a text; None without a bound.
        max_length: tokens of prompt and text together; None without a bound.
        context: the same, by what the model was made for: a prompt may not be longer.
        restrictions: tokens that may not come.
        late_ends: those of ``ends`` that may not come before the least number of tokens.

    Raises:
        UsageError: a value without meaning.
    """

    sampling: Sampling
    ends: frozenset[int]
    stops: tuple[str, ...] = ()
    decoder: Callable[[], Decoder] | None = None
    max_tokens: int | None = None
    max_length: int | None = None
    context: int | None = None
    restrictions: Restrictions = field(default_factory=Restrictions)
    late_ends: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 0:
            raise UsageError(f"max_tokens is {self.max_tokens}; expected 0 or more.")

    def room(self, prompt: int) -> int | None:
        """Return the most tokens of a text after a prompt of that many.

        Raises:
            UsageError: the prompt is longer than the model's context.
        """
        if self.context is not None and prompt > self.context:
            raise UsageError(
                f"The prompt has {prompt} tokens; the model was made for {self.context} at most. "
                "Leave out the beginning."
            )
        lengths = [n for n in (self.max_length, self.context) if n is not None]
        counts = [max(0, length - prompt) for length in lengths]
        return min([*counts, *([] if self.max_tokens is None else [self.max_tokens])], default=None)


class TextRow:
    """One text: chooses its tokens until it has ended.

    Args:
        how: it is written.
        prompt: (T,) int64.
        index: its number in a batch.

    Attributes:
        left: tokens it may still have; None without a bound.
        ended: whether it has.

    Raises:
        UsageError: the prompt is longer than the model's context.
    """

    def __init__(self, how: Generation, prompt: np.ndarray, index: int = 0) -> None:
        sampling = replace(how.sampling, seed=how.sampling.seed + index)
        self._choose, self._how = sampling.chooser(prompt.tolist()), how
        self._prompt, self._written = len(prompt), 0
        self._ngrams = NGrams(how.restrictions.ngram, prompt.tolist())
        self._decode = how.decoder() if how.stops and how.decoder else None
        self._stops = StopStrings(how.stops)
        self.left = how.room(len(prompt))
        self.ended = self.left == 0

    def choose(self, logits: np.ndarray) -> int:
        """Return the next token; END where there is none."""
        if self.ended:
            return END
        how, repeated = self._how, self._ngrams.repeated()
        allowed = how.restrictions.allowed(
            logits, self._prompt, self._written, how.late_ends, repeated
        )
        token = self._choose(allowed)
        if token in how.ends:
            self.ended = True
            return END
        self._written += 1
        self._ngrams.add(token)
        if self.left is not None:
            self.left -= 1
        if self._decode is not None:
            self._stops.feed(self._decode(token))
        self.ended = self.left == 0 or self._stops.stopped
        return token


def continuations(
    begin: Callable[[], np.ndarray],
    step: Callable[[np.ndarray], np.ndarray],
    texts: Sequence[TextRow],
) -> Iterator[tuple[int, ...]]:
    """Yield the next token of every text, END for those that have ended, until all have.

    Args:
        begin: returns the logits after the prompts, (B, vocabulary).
        step: takes the tokens yielded last, (B,) int64; returns the logits after them.
        texts: one for each row.
    """
    if all(text.ended for text in texts):
        return
    logits = begin()
    while True:
        tokens = tuple(t.choose(row) for t, row in zip(texts, logits, strict=True))
        if all(token == END for token in tokens):
            return
        yield tokens
        if all(text.ended for text in texts):
            return
        logits = step(np.array(tokens))
