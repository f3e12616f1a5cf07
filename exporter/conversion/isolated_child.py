"""The process that an isolated conversion runs in: ``python -m`` this module.

    one JSON object on standard input   ->  {"source", "options", "folder", "readable", "writable",
                                             "groups"}
    JSON lines on the descriptor named  <-  {"confined"}, {"begin"}, {"end"}, ..., then {"done"} or
    as the only argument                    {"error", "message"}

The parent takes nothing from here but JSON and the files of the folder.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from linexport.option_names import shown_as_flags
from linexport.system import memory, sandbox
from linexport.system.json_object import JsonObject
from linexport.system.progress import Silent

_OUT_OF_MEMORY = re.compile("an(not|'t) allocate memory|bad_alloc|bad allocation")
"""In messages of the system, of PyTorch and of C++."""


class _Parent(Silent):
    """Sends the stages to the parent process."""

    def __init__(self, channel: int) -> None:
        self.channel = channel

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """See ``linexport.system.progress.Progress``."""
        self.tell(begin=name)
        yield
        self.tell(end=name)

    def tell(self, **message: object) -> None:
        """Send one message."""
        os.write(self.channel, json.dumps(message).encode() + b"\n")


def main() -> None:
    """Run one conversion as standard input describes it."""
    config = json.load(sys.stdin)
    parent = _Parent(int(sys.argv[1]))
    os.dup2(2, 1)  # what the model prints is not the result
    options, folder = config["options"], Path(config["folder"])
    limits = sandbox.ProcessLimits(options["max_memory"], options["max_file"])
    sandbox.die_with_parent()
    confined = sandbox.confine(
        limits,
        [folder, *map(Path, config["writable"])],
        [Path(path) for path in config["readable"]],
        {controller: Path(path) for controller, path in config["groups"].items()},
    )
    parent.tell(confined=asdict(confined))
    memory.own_process()
    try:
        with shown_as_flags():  # also where one error quotes another
            _convert(config["source"], options, folder, parent)
    except BaseException as error:
        if _out_of_memory(error):
            parent.tell(error="MemoryError", message="")
            return
        lines = str(error).strip().splitlines() or ["no message"]
        known = _is_ours(error)
        parent.tell(error=type(error).__name__, message=_as_written(error) if known else lines[0])
    else:
        parent.tell(done=True)


def _convert(source: str, given: JsonObject, folder: Path, parent: _Parent) -> None:
    # Imported here: namespaces want a process with one thread.
    from linexport.conversion.pipeline import job_of
    from linexport.conversion.publish import write_reports
    from linexport.conversion.run import run
    from linexport.manifest import ConvertOptions

    job = job_of(source, Path(given.pop("output")), ConvertOptions(**given), folder, parent)
    write_reports(folder, run(job))


def _as_written(error: BaseException) -> str:
    """Return a message with flags: the parent shows it as its own caller takes it."""
    with shown_as_flags():
        return str(error)


def _out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or the model's own error that caused it, is of lacking memory."""
    while error is not None:
        if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)):
            return True
        error = error.__cause__
    return False


def _is_ours(error: BaseException) -> bool:
    from linexport.errors import LinexportError

    return isinstance(error, LinexportError)


if __name__ == "__main__":
    main()
