"""Control groups of Linux for one conversion: processes, and memory of all of them together.

    version 2:  <mount>/<own group>/<new>/            pids.max, memory.max
    version 1:  <mount>/<controller>/<own group>/<new>/   pids.max, memory.limit_in_bytes

Made where this user may, which is seldom outside containers and services; elsewhere there are none.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

MOUNT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
FILES = {"pids": ("pids.max", "pids.max"), "memory": ("memory.max", "memory.limit_in_bytes")}
"""Files of the limit in versions 2 and 1, by controller."""

_UNLIMITED = 2**60
"""Bytes from which version 1 writes a limit that is none."""


@contextmanager
def control_groups(limits: Mapping[str, int]) -> Iterator[dict[str, Path]]:
    """Yield folders of new groups that processes may join, by controller; remove them afterwards.

    Args:
        limits: by controller, ``pids`` or ``memory``.
    """
    name = f"linexport-{secrets.token_hex(8)}"
    made: dict[str, Path] = {}
    for controller, limit in limits.items():
        place = _group(controller)
        if place is not None and _make(place[0] / name, place[1], limit):
            made[controller] = place[0] / name
    try:
        yield made
    finally:
        for folder in set(made.values()):
            with suppress(OSError):  # it goes with its last process
                folder.rmdir()


def _group(controller: str) -> tuple[Path, str] | None:
    """Return the folder of this process's group and the name of the file of a limit in it."""
    newer, older = FILES[controller]
    try:
        lines = [line.split(":", 2) for line in OWN.read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in lines:
        if controller in controllers.split(","):
            return MOUNT / controller / path.lstrip("/"), older
    for _, controllers, path in lines:
        folder = MOUNT / path.lstrip("/")
        delegated = folder / "cgroup.subtree_control"
        with suppress(OSError):
            if not controllers and controller in delegated.read_text().split():
                return folder, newer
    return None


def _make(folder: Path, file: str, limit: int) -> bool:
    try:
        folder.mkdir(exist_ok=True)
        (folder / file).write_text(str(limit))
    except OSError:
        with suppress(OSError):
            folder.rmdir()
        return False
    return True


def memory_left() -> int | None:
    """Return the bytes that this process's group may still take; None where it has no limit.

    Pages of files that the group has not used for long would be dropped first: they count as free.
    """
    place = _group("memory")
    if place is None:
        place = _unified()
    if place is None:
        return None
    folder, limit_file = place
    usage_file = "memory.current" if limit_file == "memory.max" else "memory.usage_in_bytes"
    try:
        limit = (folder / limit_file).read_text().strip()
        used = int((folder / usage_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if not limit.isdecimal() or int(limit) >= _UNLIMITED:
        return None
    files = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return max(0, int(limit) - used + files)


def _unified() -> tuple[Path, str] | None:
    """Return the folder of this process's group in version 2, whether or not others may be made."""
    with suppress(OSError):
        for line in OWN.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0" and not controllers:
                folder = MOUNT / path.lstrip("/")
                if (folder / "memory.max").exists():
                    return folder, "memory.max"
    return None
