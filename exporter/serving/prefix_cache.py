"""States after known prefixes, so that a prompt is computed from the longest of them.

    key      SHA-256 over the digest of the model and the token ids before the state
    value    the state, which is exact: going on from it is going on from the tokens

A state of a linear model has one size at any length, so that a prefix of thousands of tokens costs
what one of ten does. The least recently used states leave first, by bytes.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from linexport.artifact.state import StreamState
from linexport.errors import UsageError

EVERY = 512
"""Tokens between two states kept of one prompt."""


@dataclass(frozen=True)
class CacheStatistics:
    """Counts since the cache was made, and what it holds.

    Attributes:
        hits: look-ups that found a prefix.
        misses: look-ups that found none.
        tokens: tokens of the prefixes found.
        evicted: states that left for others.
        states: number held.
        bytes: of the states held.
    """

    hits: int
    misses: int
    tokens: int
    evicted: int
    states: int
    bytes: int


class PrefixCache:
    """States by the tokens before them, of one model or several; safe for threads.

    Args:
        budget_mb: bytes of all states, in units of 10^6.
        every: a pool keeps the state of a prompt after every so many tokens.

    Raises:
        UsageError: a number that is not above 0.
    """

    def __init__(self, budget_mb: float, every: int = EVERY) -> None:
        for name, value in (("budget_mb", budget_mb), ("every", every)):
            if not value > 0:
                raise UsageError(f"{name} is {value}; expected more than 0.")
        self.budget, self.every = int(budget_mb * 1e6), every
        self._states: OrderedDict[bytes, tuple[int, StreamState]] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._hits = self._misses = self._tokens = self._evicted = self._bytes = 0

    def longest(
        self, model_sha256: str, ids: np.ndarray, most: int | None = None
    ) -> tuple[int, StreamState | None]:
        """Return the length of the longest known prefix and the state after it; 0 and None.

        Args:
            model_sha256: digest of the model.
            ids: tokens, (T,) int64.
            most: longest prefix to return; None for all of the tokens.
        """
        limit = len(ids) if most is None else most
        with self._lock:
            lengths = sorted(n for n in self._lengths if n <= limit)
            keys = list(_keys(model_sha256, ids, lengths))
            for length, key in reversed(list(zip(lengths, keys, strict=True))):
                if key in self._states:
                    self._states.move_to_end(key)
                    self._hits, self._tokens = self._hits + 1, self._tokens + length
                    return length, self._states[key][1]
            self._misses += 1
        return 0, None

    def put(self, ids: np.ndarray, state: StreamState) -> None:
        """Keep the state after these tokens; one that is larger than the budget is not kept."""
        (key,) = _keys(state.model_sha256, ids, [len(ids)])
        with self._lock:
            if key in self._states:
                self._states.move_to_end(key)
                return
            if state.nbytes > self.budget:
                return
            self._states[key] = len(ids), state
            self._lengths[len(ids)] += 1
            self._bytes += state.nbytes
            while self._bytes > self.budget:
                _, (length, gone) = self._states.popitem(last=False)
                self._lengths[length] -= 1
                self._lengths += Counter()  # without lengths that nothing has
                self._bytes -= gone.nbytes
                self._evicted += 1

    def statistics(self) -> CacheStatistics:
        """Return counts since the cache was made, and what it holds."""
        with self._lock:
            counts = self._hits, self._misses, self._tokens, self._evicted
            return CacheStatistics(*counts, len(self._states), self._bytes)


def _keys(model_sha256: str, ids: np.ndarray, lengths: list[int]) -> Iterator[bytes]:
    """Yield the keys of prefixes of ascending lengths, reading the tokens once."""
    running, start = hashlib.sha256(model_sha256.encode()), 0
    for length in lengths:
        running.update(np.ascontiguousarray(ids[start:length], np.int64).data)
        start = length
        yield running.copy().digest()
