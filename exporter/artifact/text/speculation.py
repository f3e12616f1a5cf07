"""Exact speculative decoding: tokens proposed by a draft, checked by the model several in a call.

    propose d_1 ... d_k    verify x, d_1 ... d_k in one call    keep those the model chooses too

Of the proposals as many are checked as twice the right ones of the last call, and one more: a text
that no draft foresees costs little more than without one.

Every token is chosen from the model's own logits, once and in order, by argmax or by sampling: the
text is that without a draft, also with the same seed. Source of prompt look-up: A. Saxena, Prompt
Lookup Decoding, 2023.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from linexport.artifact.call_inputs import Arrays
from linexport.artifact.model import Model
from linexport.artifact.stream import Stream
from linexport.artifact.text.continuation import END, TextRow

PROPOSED = 8
"""Tokens proposed at a time."""

LONGEST = 3
"""Tokens of the n-grams that are looked up."""

LOGITS = "logits"
"""Output of heads for multi-token prediction."""


class Draft(Protocol):
    """Proposes tokens.

    Attributes:
        proposed: number of tokens proposed so far.
        accepted: number of these that the model chose too.
        calls: of the model, since the prompt.
    """

    proposed: int
    accepted: int
    calls: int

    def begin(self) -> None:
        """Begin a new text."""
        ...

    def read(self, hidden: np.ndarray | None) -> None:
        """Take the model's hidden states, (T, width), of the next tokens of the text.

        None where it gives none. By default they are left alone.
        """
        return None

    def propose(self, text: Sequence[int]) -> list[int]:
        """Return tokens that may follow a text, which goes on from that of the last call."""
        ...


class NGramDraft(Draft):
    """Prompt look-up: what followed the last tokens where they were in the text before.

    Costs next to nothing, and helps where a text repeats itself or its prompt.

    Args:
        tokens: proposed at a time.
    """

    def __init__(self, tokens: int = PROPOSED) -> None:
        self._most = tokens
        self.begin()
        self.proposed = self.accepted = self.calls = 0

    def begin(self) -> None:
        """See ``Draft``."""
        self._after: dict[tuple[int, ...], int] = {}
        self._read = 0

    def propose(self, text: Sequence[int]) -> list[int]:
        """See ``Draft``."""
        # The n-gram at the very end has nothing after it yet.
        for end in range(max(1, self._read), len(text)):
            for size in range(1, min(LONGEST, end) + 1):
                self._after[tuple(text[end - size : end])] = end
        self._read = len(text)
        for size in range(min(LONGEST, len(text)), 0, -1):
            found = self._after.get(tuple(text[-size:]))
            if found is not None:
                copied = list(text[found:])
                # What follows the end of the text goes on as the copy itself: "ab ab" by "ab ab".
                while len(copied) < self._most:
                    copied += copied
                return copied[: self._most]
        return []


class StreamDraft(Draft):
    """A smaller language model with the same tokens, by argmax.

    Args:
        stream: of that model, with a history of at least ``tokens``.
        tokens: proposed at a time.
    """

    def __init__(self, stream: Stream, tokens: int = 4) -> None:
        self._stream, self._most = stream, tokens
        self.begin()
        self.proposed = self.accepted = self.calls = 0

    def begin(self) -> None:
        """See ``Draft``."""
        self._stream.reset()
        self._fed: list[int] = []

    def propose(self, text: Sequence[int]) -> list[int]:
        """See ``Draft``."""
        common = 0
        for ours, given in zip(self._fed, text, strict=False):
            if ours != given:
                break
            common += 1
        common = min(common, len(text) - 1)
        self._stream.rewind(len(self._fed) - common)
        self._fed[common:] = text[common:]
        found: list[int] = []
        *before, piece = self._stream.pieces(np.asarray(text[common:], np.int64))
        for part in before:
            self._stream.verify(part, known=len(part))
        while True:
            found.append(self._stream.verify(piece, known=len(piece)).tokens[-1])
            if len(found) == self._most:
                return found
            self._fed.append(found[-1])
            piece = np.array([found[-1]], np.int64)


class PredictorDraft(Draft):
    """The head for multi-token prediction of the model itself, by argmax.

    It reads each token with the hidden state that the model has of the token before. After a
    proposal of its own it reads a hidden state of its own in that place, and none of that is kept:
    its state is of tokens and hidden states of the text alone.

    Args:
        head: that of the model which checks what is proposed.
        hidden: name of its output that goes on as its input ``hidden_states``.
        tokens: proposed at a time.
    """

    def __init__(self, head: Model, hidden: str, tokens: int = 2) -> None:
        self._head, self._hidden, self._most = head, hidden, tokens
        self.model_sha256 = head.model_sha256
        self.begin()
        self.proposed = self.accepted = self.calls = 0

    def begin(self) -> None:
        """See ``Draft``."""
        self._state = self._head.hold(self._head.initial_state())
        self._read: list[np.ndarray] = []

    def read(self, hidden: np.ndarray | None) -> None:
        """See ``Draft``."""
        assert hidden is not None  # a model with such a head gives them
        self._read.append(hidden)

    def propose(self, text: Sequence[int]) -> list[int]:
        """See ``Draft``."""
        hidden = np.concatenate(self._read)[None]
        self._read.clear()
        tokens = np.asarray(text[len(text) - hidden.shape[1] :], np.int64)
        outputs, self._state = self._call(tokens, hidden, self._state)
        state, found = self._state, [int(outputs[LOGITS][0, -1].argmax())]
        while len(found) < self._most:
            hidden = outputs[self._hidden][:, -1:]
            outputs, state = self._call(np.array(found[-1:]), hidden, state)
            found.append(int(outputs[LOGITS][0, -1].argmax()))
        return found

    def _call(self, tokens: np.ndarray, hidden: np.ndarray, state: Arrays) -> tuple[Arrays, Arrays]:
        given = {"input_ids": tokens[None], "hidden_states": hidden}
        return self._head.call(self._head.inputs.bind([given], {})[0], state)


def speculative(stream: Stream, prompt: np.ndarray, text: TextRow, draft: Draft) -> Iterator[int]:
    """Yield the tokens after a prompt, (T,) int64, as ``continuations`` does."""
    read, most, begun = prompt.tolist(), PROPOSED, False
    draft.begin()
    *before, known = stream.pieces(prompt)
    for piece in before:
        draft.read(stream.verify(piece, known=len(piece)).hidden)
    while not text.ended:
        # The prompt is a call of its own: what is wrong after it is not worth computing it again.
        proposals = draft.propose(read)[:most] if begun else []
        if text.left is not None:
            proposals = proposals[: text.left - 1]
        tokens = np.concatenate([known, np.asarray(proposals, np.int64)])
        verified = stream.verify(tokens, known=len(known), choose=text.choose)
        draft.read(verified.hidden)
        if begun:
            draft.calls += 1
            draft.proposed += len(proposals)
            draft.accepted += len(verified.tokens) - 1
        if proposals:  # a wrong one costs more than a call: what follows it is computed again
            most = 2 * len(verified.tokens) - 1
        for token in verified.tokens:
            if token == END:
                return
            yield token
        begun = True
        read += verified.tokens
        known = np.array(verified.tokens[-1:], np.int64)
