"""Where to put the names of points so that they cover neither each other nor the points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

STEPS = 16
THICK = 5.0
RADII = (10.0, 16.0, 26.0, 38.0, 52.0, 68.0, 86.0, 106.0, 130.0, 160.0)


@dataclass(frozen=True)
class Box:
    """A rectangle; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float

    @classmethod
    def around(cls, x: float, y: float, width: float, height: float) -> Box:
        """Of that size, with its centre there."""
        return cls(x - width / 2, y - height / 2, x + width / 2, y + height / 2)

    def overlaps(self, other: Box) -> bool:
        """They have an area in common."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def holds(self, other: Box) -> bool:
        """The other lies wholly inside."""
        return (
            self.left <= other.left
            and other.right <= self.right
            and self.top <= other.top
            and other.bottom <= self.bottom
        )

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """Its point closest to that one."""
        return min(max(x, self.left), self.right), min(max(y, self.top), self.bottom)

    def distance(self, x: float, y: float) -> float:
        """To that point; 0 inside."""
        near = self.nearest(x, y)
        return math.hypot(near[0] - x, near[1] - y)


def along(corners: Sequence[tuple[float, float]]) -> list[Box]:
    """Small boxes on a line through these points, for names to keep off it."""
    found = []
    for (x1, y1), (x2, y2) in pairwise(corners):
        pieces = max(1, round(math.hypot(x2 - x1, y2 - y1) / THICK))
        for at in range(pieces + 1):
            share = at / pieces
            found.append(Box.around(x1 + share * (x2 - x1), y1 + share * (y2 - y1), THICK, THICK))
    return found


def place(
    x: float, y: float, width: float, height: float, taken: Sequence[Box], inside: Box
) -> Box:
    """A box of that size beside the point: the nearest place, right first, that is free.

    Where nothing is free, the place beside it that overlaps with the fewest.
    """
    places = []
    for radius in RADII:
        for step in range(STEPS):
            # 0, +1, -1, +2, ...: to the right, then up and down from there, the left last.
            turn = (step + 1) // 2 * (-1 if step % 2 else 1) * 2 * math.pi / STEPS
            across, down = math.cos(turn), math.sin(turn)
            centre_x = x + across * (radius + width / 2)
            box = Box.around(centre_x, y + down * (radius + height / 2), width, height)
            if inside.holds(box):
                places.append(box)
                if not any(box.overlaps(other) for other in taken):
                    return box
    if not places:
        return Box.around(x, y - height, width, height)
    return min(places, key=lambda box: sum(box.overlaps(other) for other in taken))
