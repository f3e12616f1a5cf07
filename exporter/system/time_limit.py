"""The time that a model of a stranger may take to open, and for each call.

    with limited(300, end):                  of this process
        with opening(session_options):       around opening a session
            InferenceSession(...)
        with watched() as options:           around each call
            session.run(None, inputs, options)

ONNX Runtime looks at the options of a call before every node, in bodies of loops too, and at those
of a session between two passes over its graph, one of which computes all that is constant. It ends
neither within a node or a pass: then ``end`` is called, which ends the process.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from linexport.errors import TimeLimitError

if TYPE_CHECKING:
    import onnxruntime

DEFAULT = 300
"""Seconds of a call on the command line."""

GRACE = 5.0
"""Seconds between the request that ONNX Runtime stops and the end of the process."""

_BETWEEN = 0.2
"""Seconds between two looks at what runs."""

End = Callable[[str], None]


@dataclass(frozen=True)
class _Running:
    """A call or an opening: until when it may run, what stops it, and the message of that."""

    until: float
    stop: Callable[[], None]
    message: str


class _Watcher:
    """Ends what has run for too long, on a thread of its own while there is a limit."""

    def __init__(self, seconds: float, end: End | None) -> None:
        self.seconds, self._end = seconds, end
        self._running: dict[object, _Running] = {}
        self._ended = threading.Event()
        context = contextvars.copy_context()  # of the command: where it writes
        self._thread = threading.Thread(target=context.run, args=[self._look], daemon=True)
        self._thread.start()

    @contextmanager
    def watch(self, stop: Callable[[], None], message: str) -> Iterator[None]:
        """Watch what is done within."""
        token = object()
        until = time.monotonic() + self.seconds
        self._running[token] = _Running(until, stop, message)
        try:
            yield
        finally:
            self._running.pop(token)

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(_BETWEEN):
            now = time.monotonic()
            for one in list(self._running.values()):
                if now > one.until:
                    one.stop()
                if now > one.until + GRACE and self._end is not None:
                    self._end(one.message)


_watcher: _Watcher | None = None


@contextmanager
def limited(seconds: float, end: End | None = None) -> Iterator[None]:
    """Limit the time of every session that this process opens meanwhile, and of every call.

    Args:
        seconds: of each; 0 for no limit.
        end: ends the process with a message, from another thread; None to wait for as long as it
            takes.
    """
    global _watcher
    before, _watcher = _watcher, _Watcher(seconds, end) if seconds > 0 else None
    try:
        yield
    finally:
        if _watcher is not None:
            _watcher.end()
        _watcher = before


@contextmanager
def watched(options: onnxruntime.SessionOptions | None = None) -> Iterator[object]:
    """Yield the options of a call, whose time is limited where there is a limit.

    Args:
        options: an ``onnxruntime.RunOptions`` for the call; None where it has none of its own.

    Raises:
        TimeLimitError: the call took longer.
    """
    if _watcher is None:
        yield options
        return
    import onnxruntime

    own = onnxruntime.RunOptions() if options is None else options

    def stop() -> None:
        own.terminate = True

    message = (
        f"A call of the model was ended after {_watcher.seconds:g} s. Its graph may have a loop "
        "without an end; if it is only slow, raise --time-limit."
    )
    with _watcher.watch(stop, message):
        try:
            yield own
        except Exception as error:
            if own.terminate:
                raise TimeLimitError(message) from error
            raise
        finally:
            own.terminate = False


@contextmanager
def opening(options: onnxruntime.SessionOptions) -> Iterator[None]:
    """Limit the time of opening a session where there is a limit.

    Args:
        options: the ``onnxruntime.SessionOptions`` it is opened with, and no other is.

    Raises:
        TimeLimitError: it took longer.
    """
    if _watcher is None:
        yield
        return
    stopped: list[bool] = []

    def stop() -> None:
        stopped.append(True)
        options.set_load_cancellation_flag(True)

    message = (
        f"Opening the model was ended after {_watcher.seconds:g} s. What is constant in its graph "
        "is computed then; if that is only slow, raise --time-limit."
    )
    with _watcher.watch(stop, message):
        try:
            yield
        except Exception as error:
            if stopped:
                raise TimeLimitError(message) from error
            raise
