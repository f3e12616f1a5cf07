"""Memory and disk that weights in fewer bits take to make, said and checked before.

    memory    BASE + part of the float32 weights
    disk      weights in files without a name and models that are opened meanwhile, in TMPDIR;
              the float32 artifact and the new one, beside the output

Parts of disk are those of the files that are written. Memory is most while the checkpoint is read,
which holds its weights in float32 once; later they are in mapped files.
"""

from __future__ import annotations

from pathlib import Path

from linexport.system import room
from linexport.system.progress import Progress

BASE = 3 * room.GIB // 4
"""Bytes of libraries, and of what does not depend on the weights."""

IN_MEMORY = {"convert": 1.1, "quantise": 0.4}
IN_TEMPORARY = {"convert": 2.3, "quantise": 1.3}
AT_OUTPUT = {"convert": 1.4, "quantise": 0.4}
"""Parts of the float32 weights, by what is done."""

SMALL = 2**28
"""Bytes of float32 weights below which nothing is said."""


def announce(what: str, size: int | None, output: Path, shown: Progress) -> None:
    """Say what work on so many bytes of weights takes, and refuse it where that is not there.

    Args:
        what: "convert", which begins at a source, or "quantise", at a float32 artifact.
        size: bytes of the weights in float32; None: not known.
        output: the artifact to be made.
        shown: gets the sentence.

    Raises:
        EnvironmentProblemError: there is not enough memory or disk.
    """
    if size is None or size < SMALL:
        return
    disk = {
        room.temporary(): int(IN_TEMPORARY[what] * size),
        output.absolute().parent: int(AT_OUTPUT[what] * size),
    }
    needs = room.Needs(BASE + int(IN_MEMORY[what] * size), disk)
    shown.note(needs.described())
    room.check(needs)
