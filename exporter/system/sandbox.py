"""Confine this process: limits on resources, no network, files of named folders only.

    resource limits (setrlimit)      memory, size of a file, open files, processes, no core dumps
    control groups                   processes, and memory of all together; made by the caller
    namespaces (unshare)             no network; no process outlives the first one or sees others
    Landlock                         files are read and written beneath the named folders only

What the system does not offer is left out and named. Nothing heavy is imported: namespaces want a
process with one thread.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from linexport.system import landlock

GIB = 2**30
OPEN_FILES = 4096
PROCESSES = 4096
"""And threads: libraries start one for each core, and there are several of them."""
TOGETHER = 1
"""GiB for all processes together on top of what each may take: pages of files and of the kernel."""

_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_CLONE_NEWNS = 0x00020000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 1 << 14, 1 << 18
_CAPABILITY_VERSION = 0x20080522
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38


_PROCESSES_LIMITED = f"{PROCESSES} processes and threads"


@dataclass(frozen=True)
class ProcessLimits:
    """Limits of a confined process; None for none.

    Attributes:
        memory: GiB of its own memory.
        file: GiB of each file it writes.
    """

    memory: int | None = None
    file: int | None = None


@dataclass(frozen=True)
class Confinement:
    """Names of what was applied, and of what the system does not offer."""

    applied: tuple[str, ...]
    unavailable: tuple[str, ...]


def confine(
    limits: ProcessLimits,
    writable: Sequence[Path],
    readable: Sequence[Path] = (Path("/"),),
    groups: Mapping[str, Path] | None = None,
) -> Confinement:
    """Confine this process for good; it must have one thread.

    With process isolation available, this forks: the caller goes on as a process of a namespace of
    its own, while the process that called waits for it and exits as it did.

    Args:
        limits: of resources.
        writable: folders that it may read and write.
        readable: files and folders that it may read; all of them by default.
        groups: folders of control groups by controller, see ``control_groups``; it joins them.
    """
    _libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    done: dict[str, bool] = dict.fromkeys(_limit(limits), True)
    joined = {controller for controller, group in (groups or {}).items() if _join(group)}
    done[_PROCESSES_LIMITED] = "pids" in joined or _limit_processes()
    if limits.memory is not None:
        done[f"memory of all together up to {limits.memory + TOGETHER} GiB"] = "memory" in joined
    # First: namespaces that are made within it cannot be left with the privileges of a root user.
    _own_users()
    done["no network"] = _unshare(_CLONE_NEWNET)
    done["processes end with the conversion"] = alone = _unshare(_CLONE_NEWPID)
    if alone:
        _become_first()
    done["processes of others are hidden"] = alone and _own_proc()
    wide = Path("/") in readable
    files = "writes to" if wide else "reads Python and the model, writes to"
    done[f"{files} the artifact and a temporary folder only"] = landlock.restrict(
        readable, writable
    )
    done["no capabilities"] = _drop_capabilities()
    return Confinement(
        tuple(name for name, applied in done.items() if applied),
        tuple(name for name, applied in done.items() if not applied),
    )


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _limit(limits: ProcessLimits) -> list[str]:
    """Set resource limits; return their names."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    applied = [f"{files} open files"]
    for kind, size, name in (
        (resource.RLIMIT_DATA, limits.memory, "memory"),
        (resource.RLIMIT_FSIZE, limits.file, "each file"),
    ):
        if size is not None:
            resource.setrlimit(kind, (size * GIB, size * GIB))
            applied.append(f"{name} up to {size} GiB")
    return applied


def _join(group: Path) -> bool:
    try:
        (group / "cgroup.procs").write_text("0")
    except OSError:
        return False
    return True


def _limit_processes() -> bool:
    """Limit the processes of this user by the system's own means, which exempt the root user."""
    if os.getuid() == 0:
        return False
    _, most = resource.getrlimit(resource.RLIMIT_NPROC)
    number = PROCESSES if most == resource.RLIM_INFINITY else min(PROCESSES, most)
    resource.setrlimit(resource.RLIMIT_NPROC, (number, number))
    return True


def _own_proc() -> bool:
    """Show this namespace's processes alone in /proc."""
    mount = getattr(_libc(), "mount", None)
    if mount is None or not _unshare(_CLONE_NEWNS):
        return False
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    return bool(
        mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
        and mount(b"proc", b"/proc", b"proc", flags, None) == 0
    )


def _unshare(kind: int) -> bool:
    """Enter a new namespace."""
    unshare = getattr(_libc(), "unshare", None)
    return unshare is not None and unshare(kind) == 0


def _own_users() -> None:
    """Enter a user namespace with this user alone, which may make the other namespaces."""
    uid, gid = os.getuid(), os.getgid()
    if _unshare(_CLONE_NEWUSER):
        with suppress(OSError):
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
            Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _drop_capabilities() -> bool:
    """Give up every privilege of a root user, among them that of entering other namespaces."""
    capset = getattr(_libc(), "capset", None)
    header, none = struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24)
    return capset is not None and capset(header, none) == 0


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Get this signal when the process that started this one ends."""
    _libc().prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _become_first() -> None:
    """Fork twice: go on as process 2 of the namespace; the end of process 1 is the end of all.

    Process 1 waits as the one that called does: it would survive signals to itself that are not
    handled, and one that aborts would be said to have ended otherwise.
    """
    _fork_and_wait()
    _fork_and_wait()


def _fork_and_wait() -> None:
    """Fork: go on as the child. The parent waits for it and exits as it did."""
    started: list[int] = []
    # Nothing in the namespace can send this process a signal, or keep it from passing one on.
    signal.signal(signal.SIGTERM, lambda *_: _kill(started))
    die_with_parent(signal.SIGTERM)
    started.append(os.fork())
    if started[0] == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent()
        return
    _drop_capabilities()
    for descriptor in range(3, 64):
        with suppress(OSError):
            os.close(descriptor)
    while True:  # as the first process of a namespace this one has orphans, too
        process, status = os.wait()
        if process == started[0]:
            break
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _kill(processes: Sequence[int]) -> None:
    for process in processes:
        os.kill(process, signal.SIGKILL)
