"""``Task``: what a request asks of the engine, as the engine sees it.

state -> begin -> receive -> ... -> receive: None     done
-> fail                                an error, the engine's or its own
-> park                                the engine stops
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from linexport.artifact import StreamState
from linexport.serving.session import Session

Feeds = Mapping[str, np.ndarray]
"""Inputs of a call, or outputs of one, by name."""


class Task(Protocol):
    """A sequence to be advanced. Its methods are called in the engine's thread.

    Attributes:
        cancelled: set by ``Engine.cancel``.
        resumes: name of the held session that it goes on with; None takes a slot.
        holds: name under which its session is kept when it is done; None frees the slot.
        logits_to_keep: last tokens of each call whose logits it reads; 0 is all.
    """

    cancelled: bool
    resumes: str | None
    holds: str | None
    logits_to_keep: int

    def state(self) -> StreamState | None:
        """Return the state to begin from; None for the beginning."""
        ...

    def begin(self) -> Feeds | None:
        """Return the first inputs; None where there is nothing to compute."""
        ...

    def receive(self, outputs: Feeds, session: Session) -> Feeds | None:
        """Take outputs, and return the next inputs, None when done.

        A piece may be computed in several calls, and this is called after each. What it returns
        while ``session.queued`` is not 0 is ignored.
        """
        ...

    def fail(self, error: Exception) -> None:
        """Take the error that ended it."""
        ...

    def park(self, session: Session | None) -> None:
        """Keep what is needed to go on later: the engine stops."""
        ...
