"""Prompts of a language model: their token ids, and where states are kept.

    marks of a prompt of T tokens    every, 2 every, ...    and T - 1

The state before the last token serves the same prompt again, whose logits need that token, as well
as a longer one that begins with it.
"""

from __future__ import annotations

import numpy as np

from linexport.artifact.call_inputs import Arrays
from linexport.artifact.runtime import Artifact
from linexport.artifact.state import StreamState
from linexport.artifact.text.language_interface import language_interface
from linexport.serving.prefix_cache import PrefixCache


class History:
    """Token ids of a sequence from its beginning; appending takes constant time on average."""

    def __init__(self) -> None:
        self._held, self._length = np.empty(64, np.int64), 0

    @property
    def ids(self) -> np.ndarray:
        """All ids, (T,)."""
        return self._held[: self._length]

    def add(self, ids: np.ndarray) -> None:
        """Append ids, (T,)."""
        end = self._length + len(ids)
        if end > len(self._held):
            self._held = np.concatenate([self.ids, np.empty(2 * end - self._length, np.int64)])
        self._held[self._length : end] = ids
        self._length = end


class Prompts:
    """The prefix cache of a pool, for prompts of its model.

    Raises:
        UsageError: the model is not a language model.
    """

    def __init__(self, model: Artifact, cache: PrefixCache) -> None:
        self.cache, self._model = cache, model
        self._tokens = language_interface(model.manifest).tokens
        self._defaults = {i.name: i.default for i in model.manifest.inputs}

    def ids(self, feeds: Arrays) -> np.ndarray | None:
        """Return the token ids of a piece; None where another input changes what they mean."""
        others = (n for n in feeds if n != self._tokens)
        if any((feeds[name] != self._defaults[name]).any() for name in others):
            return None
        return feeds[self._tokens][0]

    def longest(self, ids: np.ndarray) -> tuple[int, StreamState | None]:
        """Return the length of the longest known prefix that leaves a token, and its state."""
        return self.cache.longest(self._model.model_sha256, ids, len(ids) - 1)

    def marks(self, start: int, length: int) -> frozenset[int]:
        """Return where in a piece states are kept, ``start`` tokens being before it."""
        if length == 1:
            return frozenset()
        every = self.cache.every
        regular = range(-start % every or every, length, every)
        return frozenset({*regular, length - 1})
