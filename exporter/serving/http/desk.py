"""Read large bodies and write large responses, one after another, in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

Result = TypeVar("Result")

SMALL = 2**14
"""Bytes that take no time worth a thread."""


class Desk:
    """A thread for work in short steps, between which the event loop has its turns.

    One alone: two would take the loop's turns from each other.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "desk")

    async def do(self, size: int | None, work: Callable[..., Result], *arguments: object) -> Result:
        """Return what a function returns.

        Args:
            size: bytes that it reads or writes; of few, it is called here. None: it may take long.
            work: the function.
            arguments: of it.
        """
        if size is not None and size <= SMALL:
            return work(*arguments)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, partial(work, *arguments))

    def close(self) -> None:
        """End the thread when it is done."""
        self._thread.shutdown(wait=False, cancel_futures=True)
