"""Numbers -> positions and ticks of the chart axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

Scale = Callable[[float], float]
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def log_scale(low: float, high: float, start: float, end: float) -> Scale:
    """Maps low..high to start..end so that equal ratios take equal distances."""
    span = math.log(high / low)
    return lambda value: start + (end - start) * math.log(value / low) / span


def linear_scale(low: float, high: float, start: float, end: float) -> Scale:
    """Maps low..high to start..end."""
    return lambda value: start + (end - start) * (value - low) / (high - low)


def octaves(values: Sequence[float], most: int) -> tuple[float, float, list[float]]:
    """Limits with a margin around the values, and at most so many powers of two between them."""
    margin = max(1.12, (max(values) / min(values)) ** 0.03)
    low, high = min(values) / margin, max(values) * margin
    if high / low < 4:
        middle = math.sqrt(low * high)
        low, high = middle / 2, middle * 2
    exponents = list(range(max(0, math.ceil(math.log2(low))), math.floor(math.log2(high)) + 1))
    step = math.ceil(len(exponents) / most)
    # Counted from the right: the longest length is the one people look for.
    return low, high, [2.0**exponent for exponent in sorted(exponents[::-1][::step])]


def decades(values: Sequence[float], most: int) -> tuple[float, float, list[float]]:
    """Limits on round numbers around the values, and ticks at 1, 2, 5 or at powers of ten."""
    first = math.floor(math.log10(min(values))) - 1
    last = math.ceil(math.log10(max(values))) + 1
    fine = [digit * 10.0**power for power in range(first, last + 1) for digit in (1, 2, 5)]
    low = max(tick for tick in fine if tick <= min(values) / 1.05)
    high = min(tick for tick in fine if tick >= max(values) * 1.05)
    inside = [tick for tick in fine if low <= tick <= high]
    if len(inside) <= most:
        return low, high, inside
    tens = [tick for tick in inside if round(math.log10(tick), 9).is_integer()]
    return low, high, tens[:: math.ceil(len(tens) / most)]


def round_steps(top: float, most: int = 4) -> list[float]:
    """Ticks from zero to at least top in whole steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** max(0, math.floor(math.log10(max(top, 1.0) / most)))
    sizes = (factor * power for factor in (1, 2, 5, 10))
    step = next(size for size in sizes if size * most >= top)
    return [step * index for index in range(math.ceil(top / step) + 1)]


def power_of_ten(exponent: int) -> str:
    """-6 -> 10⁻⁶."""
    return f"10{str(exponent).translate(SUPERSCRIPT)}"


def short(value: float) -> str:
    """2000000 -> 2M; 0.05 -> 0.05."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The wanted positions, moved as little as keeps them gap apart and between low and high."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed = [min(max(wanted[index], low), high) for index in order]
    # Each pass parts the neighbours that overlap, half the overlap each.
    for _ in range(200):
        moved = False
        for left, right in pairwise(range(len(placed))):
            overlap = gap - (placed[right] - placed[left])
            if overlap > 0.01:
                placed[left], placed[right] = (
                    placed[left] - overlap / 2,
                    placed[right] + overlap / 2,
                )
                moved = True
        down, up = max(0.0, low - placed[0]), max(0.0, placed[-1] - high)
        placed = [place + down - up for place in placed]
        if not moved:
            break
    result = [0.0] * len(wanted)
    for index, place in zip(order, placed, strict=True):
        result[index] = place
    return result
