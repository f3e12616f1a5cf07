"""Confine this process: limits on resources, no network, writes to named folders only.

    resource limits (setrlimit)      memory, size of a file, open files, no core dumps
    namespaces (unshare)             no network; no process outlives the first one
    Landlock                         files are written beneath the named folders only

What the system does not offer is left out and named. Nothing heavy is imported: namespaces want a
process with one thread.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
OPEN_FILES = 4096

_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_CAPABILITY_VERSION = 0x20080522
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_WRITES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
"""Writing, removing and making files; REFER and TRUNCATE came with versions 2 and 3."""


@dataclass(frozen=True)
class Limits:
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


def confine(limits: Limits, writable: Sequence[Path]) -> Confinement:
    """Confine this process for good; it must have one thread.

    With process isolation available, this forks: the caller goes on as the first process of a
    namespace of its own, while the process that called waits for it and exits as it did.
    """
    _libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    applied = _limit(limits)
    unavailable: list[str] = []
    # First: namespaces that are made within it cannot be left with the privileges of a root user.
    _own_users()
    steps = (
        ("no network", lambda: _unshare(_CLONE_NEWNET)),
        ("processes end with the conversion", lambda: _unshare(_CLONE_NEWPID)),
        ("writes to the artifact and a temporary folder only", lambda: _landlock(writable)),
    )
    for name, step in steps:
        (applied if step() else unavailable).append(name)
    (applied if _drop_capabilities() else unavailable).append("no capabilities")
    if steps[1][0] in applied:
        _become_first()
    return Confinement(tuple(applied), tuple(unavailable))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _limit(limits: Limits) -> list[str]:
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


def _landlock(writable: Sequence[Path]) -> bool:
    """Restrict writes to what is beneath these folders, and /dev/null."""
    syscall = getattr(_libc(), "syscall", None)
    version = -1 if syscall is None else syscall(_LANDLOCK_CREATE, None, 0, 1)
    if syscall is None or version < 1:
        return False
    truncate = _TRUNCATE if version >= 3 else 0
    handled = _WRITES | truncate | (1 << 13 if version >= 2 else 0)
    rules = struct.pack("=Q", handled)
    ruleset = syscall(_LANDLOCK_CREATE, rules, len(rules), 0)
    if ruleset < 0:
        return False
    allowed = [(path, handled) for path in writable]
    for path, rights in [*allowed, (Path(os.devnull), _WRITE_FILE | truncate)]:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", rights, place), 0)
        os.close(place)
    done = syscall(_LANDLOCK_RESTRICT, ruleset, 0) == 0
    os.close(ruleset)
    return bool(done)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Get this signal when the process that started this one ends."""
    _libc().prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _become_first() -> None:
    """Fork: go on as process 1 of the namespace, whose end is the end of all in it."""
    started: list[int] = []
    # Nothing in the namespace can send this process a signal, or keep it from passing one on.
    signal.signal(signal.SIGTERM, lambda *_: _kill(started))
    die_with_parent(signal.SIGTERM)
    started.append(os.fork())
    if started[0] == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent()
        return
    for descriptor in range(3, 64):
        with suppress(OSError):
            os.close(descriptor)
    code = os.waitstatus_to_exitcode(os.waitpid(started[0], 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def _kill(processes: Sequence[int]) -> None:
    for process in processes:
        os.kill(process, signal.SIGKILL)
