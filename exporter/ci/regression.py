"""Compare latency, memory and error of an artifact with a baseline, allowing for noise.

Another program on the machine slows everything down alike. So calls of the artifact take turns
with calls of a yardstick, one matrix product, and the median of the ratios is compared:

    change    r_now / r_then - 1
    noise     3 sqrt(s_now^2 + s_then^2),   s = 1.858 MAD / (r sqrt(n)), of the median of n ratios
    regressed change - noise > limit

1.858 is sqrt(pi / 2) * 1.4826, which makes the median absolute deviation (MAD) the standard error
of a median of normally distributed values. What exceeds the limit by less than the noise is
measured again with more calls, and called unclear if it then still does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from linexport.ci.figures import Figures, Timing
from linexport.ci.meter import Meter
from linexport.errors import UsageError

MORE = 160
"""Calls of one figure where fewer leave the question open."""

MEMORY_NOISE = 2.0
"""Megabytes that the peak of equal runs differs by."""

ERROR_NOISE = 0.02
"""Part of the tolerance that errors differ by where sums are taken in another order."""

Verdict = Literal["same", "better", "regressed", "unclear", "not compared"]


@dataclass(frozen=True)
class Change:
    """One figure and the baseline's; ``change`` and ``noise`` are parts of the latter."""

    name: str
    before: float | None
    after: float | None
    unit: str
    change: float | None
    noise: float
    verdict: Verdict

    def described(self) -> str:
        """Return both figures and the change, for people."""
        if self.before is None or self.after is None:
            return "no figure to compare"
        text = f"{self.before:.4g} -> {self.after:.4g}{self.unit and ' ' + self.unit}"
        if self.change is None:
            return text
        return f"{text} ({self.change:+.0%}, noise {self.noise:.0%})"


def compare_figures(before: Figures, after: Figures, meter: Meter, limit: float) -> list[Change]:
    """Return every figure with the baseline's.

    Args:
        before: the baseline.
        after: as measured now.
        meter: measures again what is unclear.
        limit: part of the baseline by which a figure may be worse.
    """
    latency = [
        _latency(name, before, after, meter, limit) for name in {**before.latency, **after.latency}
    ]
    return [*latency, _memory(before, after, limit), _error(before, after, limit)]


def _latency(name: str, before: Figures, after: Figures, meter: Meter, limit: float) -> Change:
    then, now = before.latency.get(name), after.latency.get(name)
    label = f"latency of {name}"
    if then is None or now is None or before.cpu != after.cpu or before.threads != after.threads:
        one, other = (None if t is None else t.milliseconds for t in (then, now))
        return Change(label, one, other, "ms", None, 0.0, "not compared")
    change, noise = _difference(then, now)
    if change > limit >= change - noise:
        now = meter.timing(name, MORE)
        change, noise = _difference(then, now)
    verdict = _verdict(change, noise, limit)
    return Change(label, then.milliseconds, now.milliseconds, "ms", change, noise, verdict)


def _difference(then: Timing, now: Timing) -> tuple[float, float]:
    noise = 3 * math.hypot(then.standard_error, now.standard_error)
    return now.ratio / then.ratio - 1, noise


def _verdict(change: float, noise: float, limit: float) -> Verdict:
    if change - noise > limit:
        return "regressed"
    if change > limit:
        return "unclear"
    return "better" if change + noise < -limit else "same"


def _memory(before: Figures, after: Figures, limit: float) -> Change:
    then, now = before.memory, after.memory
    if then is None or now is None:
        return Change("peak memory", then, now, "MB", None, 0.0, "not compared")
    noise = MEMORY_NOISE / max(then, MEMORY_NOISE)
    change = now / max(then, 1e-9) - 1
    if abs(now - then) <= MEMORY_NOISE:
        return Change("peak memory", then, now, "MB", change, noise, "same")
    return Change("peak memory", then, now, "MB", change, noise, _verdict(change, noise, limit))


def _error(before: Figures, after: Figures, limit: float) -> Change:
    then, now = before.error, after.error
    if then is None or now is None:
        worse = then is not None
        return Change("error", then, now, "", None, 0.0, "regressed" if worse else "not compared")
    allowed = ERROR_NOISE * after.tolerance
    change, noise = now / max(then, 1e-12) - 1, allowed / max(then, allowed)
    if abs(now - then) <= allowed:
        return Change("error", then, now, "", change, noise, "same")
    return Change("error", then, now, "", change, noise, _verdict(change, noise, limit))


def parse_percent(text: str) -> float:
    """Return 0.1 for "10%" or "10".

    Raises:
        UsageError: something else.
    """
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise UsageError(f"--fail-on-regression {text!r}: expected a percentage, such as 10%.")
    return value / 100
