"""Several prompts in one stream: a row each, of any lengths.

    with a mask                    shorter prompts begin with padding, which the mask leaves out
    states of one size, no mask    each prompt by itself; then the states of all, joined
    else                           prompts of one length

A row that has ended is fed padding, so that its state does not change. Prompts longer than a call
of the model, or than its memory allows, are fed in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from linexport.artifact.model import Model
from linexport.artifact.state import StreamState
from linexport.artifact.stream import Stream
from linexport.artifact.text.continuation import END
from linexport.artifact.text.language_interface import language_interface
from linexport.errors import UsageError


class Batch:
    """Rows of a stream.

    Args:
        model: a language model.
        open_stream: returns a new stream of it.
        prompts: of each row, (T,) int64.
        given: further inputs of prompts of one length, such as embeddings of images.

    Raises:
        UsageError: the prompts have several lengths, which this model cannot take together.
    """

    def __init__(
        self,
        model: Model,
        open_stream: Callable[[], Stream],
        prompts: Sequence[np.ndarray],
        given: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        self._model, self._open, self._prompts = model, open_stream, prompts
        self._given = given or {}
        self._interface = language_interface(model.manifest)
        self._stream = open_stream()
        lengths = [len(prompt) for prompt in prompts]
        self._even = len({*lengths}) == 1
        shared = model.shared_states()
        if not self._even and self._interface.mask is None and shared:
            raise UsageError(
                f"The prompts have {', '.join(map(str, lengths))} tokens; expected one length: "
                f"{model.manifest.artifact} has no mask for padding, and the state {shared[0]} is "
                "one of all rows together. Generate from each prompt by itself, or use sessions of "
                "a pool."
            )

    def begin(self) -> np.ndarray:
        """Compute the prompts; return the logits after each, (B, vocabulary)."""
        if self._even:
            return self._feed(np.stack(self._prompts), given=self._given)
        if self._interface.mask is not None:
            longest = max(map(len, self._prompts))
            ids = np.zeros((len(self._prompts), longest), np.int64)
            mask = np.zeros_like(ids)
            for row, prompt in enumerate(self._prompts):
                ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
            return self._feed(ids, mask)
        return self._joined()

    def step(self, tokens: np.ndarray) -> np.ndarray:
        """Feed the next token of every row, (B,), END for one that has ended; see ``begin``."""
        ended = (tokens == END)[:, None]
        ids = np.where(ended, 0, tokens[:, None])
        return self._feed(ids, None if not ended.any() else (~ended).astype(np.int64))

    def _joined(self) -> np.ndarray:
        streams = [self._open() for _ in self._prompts]
        names = self._interface
        logits = [
            self._in_pieces(s, {names.tokens: p[None]})
            for s, p in zip(streams, self._prompts, strict=True)
        ]
        states = [stream.state().arrays for stream in streams]
        joined = {name: np.concatenate([s[name] for s in states]) for name in states[0]}
        self._stream.restore(StreamState(self._model.model_sha256, joined))
        return np.concatenate(logits)

    def _feed(
        self,
        ids: np.ndarray,
        mask: np.ndarray | None = None,
        given: Mapping[str, np.ndarray] | None = None,
    ) -> np.ndarray:
        names, feeds = self._interface, {self._interface.tokens: ids, **(given or {})}
        if mask is not None and names.mask is not None:
            feeds[names.mask] = mask
        return self._in_pieces(self._stream, feeds)

    def _in_pieces(self, stream: Stream, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
        """Feed tokens in pieces; return the logits after the last."""
        axis, ids = self._model.token_axis, feeds[self._interface.tokens]
        length = axis.length(feeds)
        # What belongs to images is not by token.
        piece = length if self._given else self._model.longest_piece(length, len(ids))
        for start in range(0, length, piece):
            outputs = stream.step(axis.cut(feeds, start, start + piece), logits_to_keep=1)
        logits: np.ndarray = outputs[self._interface.logits][:, -1]
        return logits
