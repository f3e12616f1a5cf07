"""The time that one call of a model may take: a graph of a stranger may have a loop without an end.

    with limited(300):                 of this process
        with watched() as options:     around each call
            session.run(None, inputs, options)

ONNX Runtime looks at the options of a call before every node, in bodies of loops too, and ends the
call once they say so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from linexport.errors import TimeLimitError

DEFAULT = 300
"""Seconds of a call on the command line."""

_BETWEEN = 0.2
"""Seconds between two looks at the calls that run."""


class _Watcher:
    """Ends calls that have run for too long, on a thread of its own while there is a limit."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._calls: dict[object, tuple[float, Any]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def add(self, options: Any) -> object:
        """Watch a call from now on; returns what ``remove`` takes."""
        token = object()
        self._calls[token] = (time.monotonic() + self.seconds, options)
        return token

    def remove(self, token: object) -> None:
        self._calls.pop(token, None)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(_BETWEEN):
            now = time.monotonic()
            for end, options in list(self._calls.values()):
                if now > end:
                    options.terminate = True


_watcher: _Watcher | None = None


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Limit the time of every call that this process makes meanwhile; 0 is no limit."""
    global _watcher
    before, _watcher = _watcher, _Watcher(seconds) if seconds > 0 else None
    try:
        yield
    finally:
        if _watcher is not None:
            _watcher.end()
        _watcher = before


@contextmanager
def watched(options: Any = None) -> Iterator[Any]:
    """Yield the options of a call, whose time is limited where there is a limit.

    Args:
        options: an ``onnxruntime.RunOptions`` for the call; None where it has none of its own.

    Raises:
        TimeLimitError: the call took longer.
    """
    watcher = _watcher
    if watcher is None:
        yield options
        return
    import onnxruntime

    own = onnxruntime.RunOptions() if options is None else options
    token = watcher.add(own)
    try:
        yield own
    except Exception as error:
        if not own.terminate:
            raise
        raise TimeLimitError(
            f"A call of the model was ended after {watcher.seconds:g} s. Its graph may have a loop "
            "without an end; if it is only slow, raise --time-limit."
        ) from error
    finally:
        watcher.remove(token)
        own.terminate = False
