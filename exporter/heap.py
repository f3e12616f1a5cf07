"""Memory that was freed and that the C library keeps: weights are many, and leave it in holes."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Return it to the system, where the C library is glibc."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library
        return
    trim(0)
