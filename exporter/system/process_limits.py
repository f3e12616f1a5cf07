"""Limits of the process that sets them: processor time and memory."""

from __future__ import annotations

import math
import resource


def limit(kind: int, most: int) -> None:
    """Lower a limit of this process, or raise it to what the system lets it have.

    Args:
        kind: one of the constants ``resource.RLIMIT_...``.
        most: bytes or seconds.
    """
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def allow(seconds: float) -> None:
    """Limit processor time from now on; beyond it, the system ends this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + seconds))
