"""The time of a call of the model: those who wait for a longer one get an error, others go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from linexport.errors import EnvironmentProblemError, TimeLimitError


class CallTimeError(EnvironmentProblemError):
    """A call took longer than the server allows, and was ended."""


@contextmanager
def in_time() -> Iterator[None]:
    """Make a call whose end by the time limit is an error of those who wait for it.

    Raises:
        CallTimeError: it took longer than ``system.time_limit`` allows this process.
    """
    try:
        yield
    except TimeLimitError as error:
        raise CallTimeError(str(error)) from None
