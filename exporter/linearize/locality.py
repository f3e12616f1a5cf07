"""Attention restricted to keys near the query: |q - k|_1 <= delta, smoothed at the edge.

exp(q.k/sqrt(d)) P(|q - k + tau g|_1 <= delta)     the product of two maps, draw by draw (MATH 5)

The error of the mask's factor grows exponentially with d: for heads wider than 4 the mask is
exp(-|q - k|_1 / delta), which has Cauchy frequencies and takes any width.
"""

from __future__ import annotations

from dataclasses import replace

from linexport.errors import UsageError
from linexport.linearize.choose import AUTO, KEEP, Wishes

LOCAL = "favor+*local"


def locality_map(wishes: Wishes, delta: float) -> Wishes:
    """The wishes with every map that is not kept multiplied by the mask.

    Raises:
        UsageError: delta is not positive, or a map is asked for that is not favor+.
    """
    if not 0 < delta < float("inf"):
        raise UsageError(f"The locality is {delta:g}; expected a distance above 0.")
    others = {kind for kind in wishes.maps.values() if kind not in ("favor+", LOCAL, KEEP)}
    if others or AUTO in others:
        raise UsageError(
            f"Locality is built on favor+, not on {', '.join(sorted(others))}: the product of two "
            "maps needs draws on both sides."
        )
    maps = {p: kind if kind == KEEP else LOCAL for p, kind in wishes.maps.items()}
    return replace(wishes, maps=maps, options={**wishes.options, "delta": float(delta)})
