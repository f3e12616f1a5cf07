"""Files damaged at random: cut short, and bytes changed, more and more of them."""

from __future__ import annotations

import random
from collections.abc import Iterator


def damaged(whole: bytes, trials: int, seed: int, every: int) -> Iterator[bytes]:
    """Yield the content damaged; each third is cut, and one more byte changes every so many."""
    generator = random.Random(seed)
    for trial in range(trials):
        data = bytearray(whole)
        if trial % 3 == 0:
            del data[generator.randrange(len(data)) :]
        for _ in range(1 + trial // every):
            if data:
                data[generator.randrange(len(data))] = generator.randrange(256)
        yield bytes(data)
