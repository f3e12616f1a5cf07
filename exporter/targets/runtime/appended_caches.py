"""Keys and values that calls append to memory which is there, as arrays that share it.

    cache of P tokens  ->  cache of P + T tokens, in the same memory where nobody holds more than P

A cache is a NumPy array (B, H, P, d), read-only, the beginning of memory for C tokens. It does not
change: a call writes behind it, and only where no other array that is held reaches further. Of two
sequences that go on from one cache the first appends, and the second gets memory of its own. So
does one that outgrows its memory: twice as much. To go back is to hold a shorter array.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from linexport.errors import UsageError
from linexport.system.untyped import ArrayLike
from linexport.targets.cpu_fusion.cache_capacity import AXIS, CACHED_TOKENS

if TYPE_CHECKING:
    from linexport.targets.cpu_fusion.cache_capacity import Caches
    from linexport.targets.runtime.device_memory import OrtMemory

LEAST = 64
"""Tokens that memory is taken for at least."""


class AppendedCaches:
    """Calls of a session that append to caches.

    Args:
        memory: of the session.
        caches: of its graph.
    """

    def __init__(self, memory: OrtMemory, caches: Caches) -> None:
        self._memory, self._caches = memory, caches

    def run(
        self, inputs: Mapping[str, ArrayLike], arrays: Mapping[str, ArrayLike]
    ) -> dict[str, ArrayLike]:
        """Run the model with some outputs written to arrays that are there; return the others.

        Raises:
            UsageError: the caches do not hold the same number of tokens.
        """
        presents = self._caches.presents
        pasts = {name: np.asarray(inputs[name]) for name in presents}
        held = {values.shape[AXIS] for values in pasts.values()}
        if len(held) != 1:
            sizes = {name: values.shape for name, values in pasts.items()}
            raise UsageError(f"Found caches of different lengths: {sizes}; expected one length.")
        before = held.pop()
        name, axis = self._caches.added
        after = before + inputs[name].shape[axis]
        grown = {presents[name]: _appended(values, after) for name, values in pasts.items()}
        whole = {name: _owner(values).memory.whole for name, values in grown.items()}
        given = {past: whole[present] for past, present in presents.items()}
        given[CACHED_TOKENS] = np.array([before], np.int64)
        others = {name: array for name, array in arrays.items() if name not in grown}
        found = self._memory.run({**inputs, **given}, {**others, **whole})
        for name in grown.keys() & arrays.keys():
            arrays[name][...] = grown.pop(name)
        return {**grown, **found}


def beginning(values: ArrayLike, axis: int, tokens: int) -> np.ndarray:
    """Return the first tokens of a cache, or of another state that grows, along an axis.

    Of a cache that calls append to it shares the memory, and the next call may append to it.
    """
    held = _held_by(values)
    if held is not None:
        return held.memory.first(tokens)
    return np.ascontiguousarray(np.asarray(values)[(slice(None),) * axis + (slice(0, tokens),)])


def own_memory(values: ArrayLike) -> np.ndarray:
    """Return an array of the host without what a cache's memory has behind it."""
    return np.array(values) if _held_by(values) is not None else np.asarray(values)


class _Memory:
    """Memory of one cache, and who holds how many of its tokens.

    Attributes:
        whole: (B, H, C, d).
    """

    def __init__(self, whole: np.ndarray) -> None:
        self.whole = whole
        self._held: Counter[int] = Counter()
        # Garbage may be collected, and arrays with it, while this thread has the lock: a count is
        # then too high at worst, and the next call makes a copy.
        self._lock = threading.RLock()

    def first(self, tokens: int) -> np.ndarray:
        """Return the array of the first tokens, which are there."""
        with self._lock:
            self._held[tokens] += 1
        return np.asarray(_Held(self, tokens))

    def append(self, before: int, after: int) -> np.ndarray | None:
        """Return the array of ``after`` tokens, None where those behind ``before`` are not free."""
        with self._lock:
            if after > self.whole.shape[AXIS] or max(self._held, default=0) > before:
                return None
            self._held[after] += 1
        return np.asarray(_Held(self, after))

    def release(self, tokens: int) -> None:
        """Count one array of so many tokens less."""
        with self._lock:
            self._held[tokens] -= 1
            if not self._held[tokens]:
                del self._held[tokens]


class _Held:
    """The beginning of a cache's memory, which an array and its views keep alive."""

    def __init__(self, memory: _Memory, tokens: int) -> None:
        self.memory, self.tokens = memory, tokens
        described = memory.whole[:, :, :tokens].__array_interface__
        self.__array_interface__ = described | {"data": (described["data"][0], True)}

    def __del__(self) -> None:
        self.memory.release(self.tokens)


def _appended(values: np.ndarray, after: int) -> np.ndarray:
    """Return an array of ``after`` tokens whose first ones are those of ``values``."""
    before, held = values.shape[AXIS], _held_by(values)
    found = held.memory.append(before, after) if held is not None else None
    if found is None:
        sizes = list(values.shape)
        sizes[AXIS] = max(LEAST, 1 << (after - 1).bit_length())
        memory = _Memory(np.empty(sizes, values.dtype))
        memory.whole[:, :, :before] = values
        found = memory.first(after)
    return found


def _owner(values: np.ndarray) -> _Held:
    owner = values.base
    assert isinstance(owner, _Held)
    return owner


def _held_by(values: ArrayLike) -> _Held | None:
    """Return what an array holds of a cache's memory, None where it is not the beginning of one."""
    base: Any = values
    while isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(base, _Held):
        return None
    mine, own = values.__array_interface__, base.__array_interface__
    same = all(mine[key] == own[key] for key in ("shape", "strides", "typestr"))
    return base if same and mine["data"][0] == own["data"][0] else None
