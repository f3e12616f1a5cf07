"""SIGINT and SIGTERM both unwind the program, so that what it began is removed on the way out.

exit code = 128 + number of the signal: 130 after Ctrl-C, 143 after SIGTERM
"""

from __future__ import annotations

import signal
from types import FrameType

MESSAGES = {
    signal.SIGINT: "Interrupted; nothing was left behind.",
    signal.SIGTERM: "Terminated; nothing was left behind.",
}

_received: list[signal.Signals] = []


def install() -> None:
    """Raise KeyboardInterrupt on both signals, except on one the parent process had ignored."""
    for number in MESSAGES:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def received() -> bool:
    """Return whether a signal came: what fails after that, fails because of it.

    Libraries that are interrupted while they are imported raise other exceptions.
    """
    return bool(_received)


def interruption() -> tuple[str, int]:
    """Return the message and the exit code of an interrupted program."""
    first = _received[0] if _received else signal.SIGINT
    return MESSAGES[first], 128 + first


def _interrupt(number: int, frame: FrameType | None) -> None:
    _received.append(signal.Signals(number))
    raise KeyboardInterrupt
