"""Memory and disk that this process may take, before it takes them.

    memory = min(what the system has free, what the process's control group leaves)

Pages of mapped files leave memory when others need it; they are not counted as taken.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from linexport.errors import EnvironmentProblemError
from linexport.system.control_groups import memory_left

GIB = 2**30

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk, a share of it, or a limit of files (``ulimit -f``) that takes no more."""

MAKE_ROOM = "Make room there, or name another disk."


@dataclass(frozen=True)
class Needs:
    """Estimated sizes in bytes: of this process's memory, and of files below folders."""

    memory: int
    disk: Mapping[Path, int]

    def described(self) -> str:
        """One sentence for people."""
        disk = " and ".join(f"{_gib(size)} in {place}" for place, size in self.disk.items())
        return f"This takes about {_gib(self.memory)} of memory, and of disk {disk}."


def temporary() -> Path:
    """Folder of files without a name."""
    return Path(tempfile.gettempdir())


def check(needs: Needs) -> None:
    """Refuse work that needs more memory or disk than is free.

    Raises:
        EnvironmentProblemError: names what is short, how much there is and what to do.
    """
    free = available_memory()
    if free is not None and not fits(needs.memory):
        raise EnvironmentProblemError(
            f"{needs.described()} There are {_gib(free)} of memory left. Close other programs, or "
            "take a machine with more."
        )
    by_device: dict[int, list[Path]] = {}
    for place in needs.disk:
        by_device.setdefault(place.stat().st_dev, []).append(place)
    for places in by_device.values():
        needed, left = sum(needs.disk[p] for p in places), shutil.disk_usage(places[0]).free
        if left < needed:
            raise EnvironmentProblemError(
                f"{needs.described()} The disk of {places[0]} has {_gib(left)} free. Make room, or "
                "name another disk with TMPDIR or --output."
            )


def fits(memory: int) -> bool:
    """Return whether this process may grow to so many bytes, as far as anything says so."""
    free = available_memory()
    return free is None or memory <= free + held_memory()


def held_memory() -> int:
    """Return the bytes that this process has taken; 0 where nothing says so."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(x for x in lines if x.startswith("RssAnon:")).split()[1])
    return 0


def available_memory() -> int | None:
    """Return the bytes of memory that could be taken now; None where nothing says so."""
    found = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(1024 * int(next(x for x in lines if x.startswith("MemAvailable:")).split()[1]))
    found += [left for left in [memory_left()] if left is not None]
    if not found and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=None)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
