"""Advisory locks on folders (flock), which end with the process that holds them.

Process ids mean nothing in another container or on another host of the same volume; locks do.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def lock(descriptor: int) -> bool | None:
    """Lock an open folder; False where another holds it, None where there are no such locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems
        return None
    return True


def hold(folder: Path) -> int | None:
    """Lock a folder until the descriptor that is returned is closed; None where another holds it.

    On a file system without such locks nothing is held.

    Raises:
        OSError: there is no such folder, or it cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    if lock(descriptor) is False:
        os.close(descriptor)
        return None
    return descriptor
