"""Bits for each weight, raised where a byte buys most.

    start: the smallest option of every weight
    step:  the option of one weight that lowers the sum of divergences most per byte

Divergences of weights quantised one at a time add up to that of all together as long as they are
small, so that a sum predicts the measurement that follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StorageOption:
    """One way to store a weight.

    Attributes:
        bits: of a value.
        bytes: stored, scales and zero points included.
        divergence: of the model with this weight alone stored so, nats.
    """

    bits: int
    bytes: int
    divergence: float


@dataclass(frozen=True)
class Allocation:
    """An option for each weight, by index.

    Attributes:
        choice: indices of options, in the order of the weights.
        bytes: their sum.
        predicted: sum of their divergences, nats.
    """

    choice: tuple[int, ...]
    bytes: int
    predicted: float


def allocations(options: Sequence[Sequence[StorageOption]]) -> Iterator[Allocation]:
    """Yield allocations from the smallest to the one that no byte improves.

    Args:
        options: for each weight its options, from the smallest.
    """
    choice = [0] * len(options)
    while True:
        taken = [own[i] for own, i in zip(options, choice, strict=True)]
        yield Allocation(
            tuple(choice), sum(o.bytes for o in taken), sum(o.divergence for o in taken)
        )
        steps = [
            (
                (taken[w].divergence - option.divergence) / max(option.bytes - taken[w].bytes, 1),
                w,
                i,
            )
            for w, own in enumerate(options)
            for i, option in enumerate(own)
            if i > choice[w] and option.divergence < taken[w].divergence
        ]
        if not steps:
            return
        _, weight, index = max(steps)
        choice[weight] = index
