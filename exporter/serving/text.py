"""Records of texts: the order, and the events that carry the text to its reader.

    Order  ->  Step, Step, ..., End  --Withheld-->  Delta, Delta, ..., End

A step is one token. A text is a function of its tokens and settings: a reader of some steps can
have the rest written elsewhere, from ``Order.after``, and reads what would have come.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from linexport.artifact import StreamState
from linexport.artifact.call_inputs import Arrays
from linexport.artifact.text.sampling import Sampling

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


@dataclass(frozen=True, eq=False)
class ImageInputs:
    """Inputs of the model for images among tokens, in addition to the tokens.

    Attributes:
        arrays: by name, (1, T, ...), for the first T tokens of those that the model has yet to see.
    """

    arrays: Arrays

    def feeds(self, tokens: int) -> Arrays:
        """Return them for so many tokens: behind the first T these have no images, which is 0."""
        return {
            name: np.pad(
                values, [(0, 0), (0, tokens - values.shape[1])] + [(0, 0)] * (values.ndim - 2)
            )
            for name, values in self.arrays.items()
        }


@dataclass(frozen=True)
class Beginning:
    """Where a text begins.

    Attributes:
        unfed: tokens that the model has yet to see.
        prompt_tokens: number of tokens before the text.
        state: after the tokens before ``unfed``; None where there are none.
        written: tokens of the text so far; the last of them may be in ``unfed``.
        seen: which tokens there are before ``unfed``, each once.
        images: inputs of the images in ``unfed``; None where there are none.
    """

    unfed: tuple[int, ...]
    prompt_tokens: int
    state: StreamState | None = None
    written: tuple[int, ...] = ()
    seen: tuple[int, ...] = ()
    images: ImageInputs | None = None

    @property
    def tokens(self) -> frozenset[int]:
        """All tokens that there are up to here."""
        return frozenset({*self.seen, *self.unfed, *self.written})

    def after(self, tokens: tuple[int, ...]) -> Beginning:
        """Return where the text goes on after further tokens of it."""
        return replace(self, unfed=self.unfed + tokens, written=self.written + tokens)


@dataclass(frozen=True)
class Order:
    """Texts of one request.

    Attributes:
        settings: of all; the seed of a text is theirs plus its number.
        texts: where each begins, by its number.
    """

    settings: TextSettings
    texts: Mapping[int, Beginning]

    def after(self, written: Mapping[int, tuple[int, ...]]) -> Order:
        """Return the order for the rest of those texts, whose tokens so far are given."""
        return replace(self, texts={i: self.texts[i].after(t) for i, t in written.items()})


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
class Step:
    """The part of a text that one token adds.

    Attributes:
        index: number of the text.
        token: its id; None where only the end of the text is added.
        text: added by it; empty while a character or a stop string may not be complete.
        shown: characters of the text up to here, this one's included.
        scored: the token's probability, if requested.
    """

    index: int
    token: int | None
    text: str
    shown: int
    scored: Scored | None = None


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


TextEvent = Step | End


@dataclass
class Withheld:
    """Tokens with probabilities whose text is not given out yet."""

    tokens: list[Scored] = field(default_factory=list)

    def delta(self, step: Step) -> Delta | None:
        """Return what a reader gets of a step, with the tokens that begin in the text shown."""
        if step.scored is not None:
            self.tokens.append(step.scored)
        ready = tuple(t for t in self.tokens if t.offset < step.shown)
        self.tokens = self.tokens[len(ready) :]
        return Delta(step.index, step.text, ready) if step.text or ready else None
