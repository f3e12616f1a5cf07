"""Logarithmic axes whose ticks are round numbers, written the way the tables write them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from linexport.report.text import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAST_RATIO = 4.0
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def octave_axis(axes: Axes, lengths: Sequence[float], most: int) -> None:
    """Make x logarithmic with at most ``most`` powers of two, the largest one included."""
    first, last = min(lengths), max(lengths)
    # A single length lies in the middle of an axis over two octaves.
    margin = max(1.12, (last / first) ** 0.03, math.sqrt(LEAST_RATIO * first / last))
    low, high = first / margin, last * margin
    powers = range(max(0, math.ceil(math.log2(low))), math.floor(math.log2(high)) + 1)
    shown = powers[::-1][:: math.ceil(len(powers) / most)]
    log_axis(axes, "x", low, high, {2.0**power: count(2**power) for power in shown})


def decade_axis(axes: Axes, axis: Literal["x", "y"], values: Sequence[float], most: int) -> None:
    """Make an axis logarithmic between round numbers: ticks at 1, 2, 5 or at powers of ten."""
    low, high = min(values) / 1.05, max(values) * 1.05
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fine = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    low = max(tick for tick in fine if tick <= low)
    high = min(tick for tick in fine if tick >= high)
    ticks = [tick for tick in fine if low <= tick <= high]
    if len(ticks) > most:
        tens = [10.0**power for power in powers if low <= 10.0**power <= high]
        ticks = tens[:: math.ceil(len(tens) / most)]
    log_axis(axes, axis, low, high, {tick: short(tick) for tick in ticks})


def log_axis(
    axes: Axes, axis: Literal["x", "y"], low: float, high: float, labels: Mapping[float, str]
) -> None:
    """Make an axis logarithmic from low to high, with these ticks and their labels."""
    axes.set(**{f"{axis}scale": "log", f"{axis}lim": (low, high)})
    getattr(axes, f"set_{axis}ticks")(list(labels), list(labels.values()))
    axes.minorticks_off()


def short(value: float) -> str:
    """Return 2000000 as 2M and 0.05 as 0.05."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def power_of_ten(exponent: int) -> str:
    """Return -6 as 10⁻⁶."""
    return f"10{str(exponent).translate(SUPERSCRIPT)}"
