"""Calls of replicas, made again when the replica is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError

from linexport.errors import LinexportError
from linexport.serving.engine import QueueFullError, StoppedError

ATTEMPTS = 5
"""Replicas that a request may outlive without getting any further: it may be what ends them."""

PAUSE = 0.2
"""Seconds before a request is sent again."""

Answer = TypeVar("Answer")


class ReplicasLostError(LinexportError):
    """Every replica that was given a request ended."""

    exit_code = 5


class Patience:
    """Decides of an error of a call whether the call is made again.

    Args:
        admitted: whether the request was taken on before, so that a full queue delays it only.
    """

    def __init__(self, admitted: bool = False) -> None:
        self._lost, self._admitted = 0, admitted

    def progress(self) -> None:
        """Note that the call has brought something."""
        self._lost, self._admitted = 0, True

    async def again(self, error: Exception) -> None:
        """Return when the call is to be made again.

        Raises:
            QueueFullError: the queues are full.
            ReplicasLostError: too many replicas have ended.
            Exception: what the model itself raised.
        """
        cause = getattr(error, "cause", None)  # of a RayTaskError, which the replica's code raised
        if isinstance(error, BackPressureError):
            cause = QueueFullError("All replicas are busy, and too many requests wait.", 1)
        if isinstance(cause, QueueFullError) and self._admitted:
            await asyncio.sleep(PAUSE)
            return
        if cause is not None and not isinstance(cause, StoppedError):
            raise cause
        self._lost, self._admitted = self._lost + 1, True
        if self._lost >= ATTEMPTS:
            raise ReplicasLostError(f"{self._lost} replicas ended while they computed this.")
        await asyncio.sleep(PAUSE)


LOST = (RayError, BackPressureError)
"""Errors that ``Patience`` decides of."""


async def surviving(call: Callable[[], Awaitable[Answer]]) -> Answer:
    """Return the answer of a call that may be made several times.

    Raises:
        Exception: see ``Patience.again``.
    """
    patience = Patience()
    while True:
        try:
            return await call()
        except LOST as error:
            await patience.again(error)
