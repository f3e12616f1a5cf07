"""Prompts of a language model: their token ids, and where states are kept.

    a token of text     its id
    a token of an image, or with another input that is not at its default
                        a digest of all inputs of such tokens up to it, below 0

    marks of a prompt of T tokens    every, 2 every, ...    and T - 1

The state before the last token serves the same prompt again, whose logits need that token, as well
as a longer one that begins with it.
"""

from __future__ import annotations

import hashlib

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
        self._inputs = {i.name: i for i in model.manifest.inputs}

    def ids(self, feeds: Arrays) -> np.ndarray | None:
        """Return what stands for the tokens of a piece, equal where all their inputs are.

        Args:
            feeds: inputs of one row.

        Returns:
            (T,) int64: ids, and digests in the place of those that have other inputs; None where
            such an input is not of each token.
        """
        ids: np.ndarray = feeds[self._tokens][0]
        differing = {
            name: values != self._inputs[name].default
            for name, values in feeds.items()
            if name != self._tokens
        }
        if not any(where.any() for where in differing.values()):
            return ids
        dims = self._inputs[self._tokens].shape
        if any(self._inputs[name].shape[:2] != dims for name in differing):
            return None
        marked = np.any([where[0].reshape(len(ids), -1).any(1) for where in differing.values()], 0)
        names, found, running = sorted(feeds), ids.copy(), hashlib.blake2b(digest_size=8)
        for place in np.flatnonzero(marked):
            for name in names:
                running.update(feeds[name][0, place].tobytes())
            found[place] = int.from_bytes(running.copy().digest(), "little") - 2**64 | -(2**63)
        return found

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
