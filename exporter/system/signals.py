"""SIGINT and SIGTERM both end the program in its own words, and leave nothing behind.

    before a command begins    there is nothing to remove: the handler answers and ends the process
    from then on               the program unwinds by KeyboardInterrupt and removes what it began

exit code = 128 + number of the signal: 130 after Ctrl-C, 143 after SIGTERM

The program imports this module first, so it imports next to nothing itself.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

MESSAGES = {
    signal.SIGINT: "Interrupted; nothing was left behind.",
    signal.SIGTERM: "Terminated; nothing was left behind.",
}
_POLL = 0.02
"""Seconds after which a signal that has to wait is looked at again."""

_received: list[signal.Signals] = []
_unwinds: list[bool] = []
"""Not empty once a command has begun."""


def install() -> None:
    """Handle both signals, except one that the parent process had ignored."""
    for number in MESSAGES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _receive)


def unwind() -> None:
    """Raise KeyboardInterrupt on signals from now on: there may be something to remove."""
    _unwinds.append(True)


def ignore() -> None:
    """Ignore signals from now on: a command that has answered keeps its exit code."""
    for number in MESSAGES:
        if signal.getsignal(number) is _receive:
            signal.signal(number, signal.SIG_IGN)


def received() -> bool:
    """Return whether a signal came: what fails after that, fails because of it.

    Libraries that are interrupted while they are imported raise other exceptions.
    """
    return bool(_received)


def interruption() -> tuple[str, int]:
    """Return the message and the exit code of an interrupted program."""
    first = _received[0] if _received else signal.SIGINT
    return MESSAGES[first], 128 + first


def _receive(number: int, frame: FrameType | None) -> None:
    _received.append(signal.Signals(number))
    if _unwinds:
        _interrupt(number, frame)
    else:
        _answer(*interruption())


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; while PyTorch is imported, as soon as that is done."""
    torch = sys.modules.get("torch")
    # C++ code that it registers then ends the process where a handler raises.
    if getattr(getattr(torch, "__spec__", None), "_initializing", False):
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, _POLL)
        return
    raise KeyboardInterrupt


def _answer(message: str, code: int) -> None:
    """Print the message and end the process: no module can be relied on while it is imported."""
    if "--json" in sys.argv[1:]:
        fields = f'"status": "error",\n  "exit_code": {code},\n  "message": "{message}"'
        os.write(1, f"{{\n  {fields}\n}}\n".encode())
    else:
        os.write(2, f"Error: {message}\n".encode())
    os._exit(code)
