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
