"""A conversion in a process of its own, confined: for models of strangers.

    parent:  start the child -> read what it tells -> check the folder it wrote
    child:   confine itself -> load, trace, ..., measure -> write to the folder

The child may crash, hang or run out of memory: that is one error here. The parent takes nothing
from it but JSON, and files that are checked.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from linexport import errors
from linexport import manifest as manifests
from linexport.conversion import isolated_reach as reach
from linexport.errors import LinexportError, UnsupportedModelError, UsageError
from linexport.manifest import ConvertOptions, Manifest
from linexport.manifest.records import IsolationRecord
from linexport.system import sandbox
from linexport.system.child_process import python_module
from linexport.system.control_groups import control_groups
from linexport.system.json_object import JsonObject
from linexport.system.progress import Progress

LONGEST = 2**20
"""Bytes of one message that are read."""
PATIENCE = 5.0
"""Seconds the child has to end after the request."""


@dataclass
class _Heard:
    """State of the child process as known from its messages."""

    confined: IsolationRecord | None = None
    stage: str = "start"
    done: bool = False
    error: tuple[str, str] | None = None
    shown: list[ExitStack] = field(default_factory=list)


def run(
    source: str, output: Path, options: ConvertOptions, folder: Path, progress: Progress
) -> Manifest:
    """Convert ``source`` into ``folder`` in a confined process; return the manifest.

    Raises:
        LinexportError: as ``convert`` raises it.
        UnsupportedModelError: the child crashed, or reached a limit.
    """
    if options.timing_cache is not None:
        raise UsageError(
            "--timing-cache names a file that later builds read, and an isolated conversion could "
            "write anything into it. Leave it or --isolated out: the kernels are timed again."
        )
    heard, dumps = _Heard(), [] if options.dump_passes is None else [options.dump_passes]
    limits = {"pids": sandbox.PROCESSES}
    if options.max_memory is not None:
        limits["memory"] = (options.max_memory + sandbox.TOGETHER) * sandbox.GIB
    with (
        tempfile.TemporaryDirectory(prefix="linexport-") as temporary,
        control_groups(limits) as groups,
    ):
        config = {
            "source": source,
            "options": {**asdict(options), "output": str(output)},
            "folder": str(folder),
            "readable": reach.readable(source, options.state_dict),
            "writable": [temporary, *dumps],
            "groups": {controller: str(group) for controller, group in groups.items()},
        }
        with _child(config, Path(temporary)) as (process, channel), ExitStack() as shown:
            heard.shown.append(shown)
            deadline = (
                None if options.max_seconds is None else time.monotonic() + options.max_seconds
            )
            for message in _messages(channel, deadline, options):
                _hear(heard, message, progress)
            ended = heard.done or heard.error is not None
            code = 0 if ended else _exit_code(process)
    for dump in dumps:
        _check(Path(dump), nested=True)
    if not heard.done:
        _raise_failure(heard, code, options)
    _check(folder)
    manifest = manifests.read(folder)
    return replace(manifest, options=options, isolation=heard.confined)


@contextmanager
def _child(
    config: Mapping[str, object], temporary: Path
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start the child and hand it its task; afterwards it and all it started are gone."""
    channel, theirs = os.pipe()
    process = subprocess.Popen(
        python_module("linexport.conversion.isolated_child", str(theirs)),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=(theirs,),
        env=reach.environment(temporary),
        start_new_session=True,
    )
    os.close(theirs)
    try:
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(json.dumps(config).encode())
        yield process, channel
    finally:
        _end(process)
        os.close(channel)


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Return how the child ended, which closed its channel; one that goes on is killed."""
    try:
        return process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the child: its namespace by SIGTERM to the process that waits for it, then its group."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _messages(
    channel: int, deadline: float | None, options: ConvertOptions
) -> Iterator[dict[str, object]]:
    """Yield messages until the child is done or its end of the channel is closed.

    Raises:
        UnsupportedModelError: the deadline has passed.
    """
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        while len(rest) < LONGEST:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and (left <= 0 or not selector.select(left)):
                raise UnsupportedModelError(
                    f"The isolated conversion took longer than {options.max_seconds} s and was "
                    "ended. Allow more with --max-seconds, or try it with --no-bench."
                )
            received = os.read(channel, 65536)
            if not received:
                return
            *lines, rest = (rest + received).split(b"\n")
            for line in lines:
                with suppress(ValueError, RecursionError):
                    message = json.loads(line)
                    if isinstance(message, dict):
                        yield message
                        if "done" in message or "error" in message:
                            return


def _hear(heard: _Heard, message: JsonObject, progress: Progress) -> None:
    """Take one message; what is not as expected is left out."""
    begun = message.get("begin")
    if isinstance(begun, str) and re.fullmatch("[a-z-]{1,20}", begun):
        heard.shown[-1].close()
        heard.stage = begun
        heard.shown[-1].enter_context(progress.stage(begun))
    elif "end" in message:
        heard.shown[-1].close()
    elif "error" in message:
        heard.error = str(message["error"]), str(message.get("message"))
    elif heard.confined is None and isinstance(message.get("confined"), dict):
        found = message["confined"]
        names = {k: tuple(map(str, found.get(k, ()))) for k in ("applied", "unavailable")}
        heard.confined = IsolationRecord(**names)
    heard.done = heard.done or message.get("done") is True


def _raise_failure(heard: _Heard, code: int, options: ConvertOptions) -> None:
    """Raise the child's own error, or say how it ended."""
    memory = f"{options.max_memory} GiB" if options.max_memory else "the machine's memory"
    more = "Allow more with --max-memory, or convert on a machine with more."
    if heard.error is not None:
        name, text = heard.error
        if name == "MemoryError":
            raise UnsupportedModelError(
                f"The isolated conversion needed more than {memory} in stage {heard.stage}. {more}"
            )
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, LinexportError):
            raise kind(text)
        raise LinexportError(f"Internal error: {name}: {text}\nThis is a fault of linexport.")
    number = -code if code < 0 else code - 128
    names = {one.value: one.name for one in signal.Signals}
    how = f"by {names[number]}" if number in names else f"with exit code {code}"
    starved = number in (signal.SIGABRT, signal.SIGKILL) or options.max_memory is not None
    hint = f" It may have needed more than {memory}. {more}" if starved else ""
    raise UnsupportedModelError(
        f"The isolated conversion was ended {how} in stage {heard.stage}: the model, or a library "
        f"on it, crashed the process.{hint} Nothing was written."
    )


def _check(folder: Path, nested: bool = False) -> None:
    """Accept regular files, and nested folders of them: a link would lead the parent elsewhere.

    Raises:
        UnsupportedModelError: there is something else.
    """
    for path in folder.iterdir():
        found = path.lstat()
        if nested and stat.S_ISDIR(found.st_mode):
            _check(path, nested)
        elif not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            raise UnsupportedModelError(
                f"The isolated conversion left {path.name!r}, which is not a file of its own; "
                "expected regular files alone. The model's code does more than compute: reject it."
            )
